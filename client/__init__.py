"""The client side: updates, models, data, and the Flower ClientApp.

Importing this package makes torchvision importable with a CPU build of torch. Every process of fedgauge (server, client,
worker, command line, test) imports it before anything else can import torchvision.
"""

from fedgauge.client.models.torchvision_mend import mend_when_imported

mend_when_imported()
