"""A whole Flower app that a curious server watches: `fedgauge init --app FOLDER` writes it in the layout of Flower Hub."""
