"""What a client computes: the vocabulary of updates, the models, the data, and the Flower ClientApp.

Importing this package repairs torchvision beside a CPU build of torch. Every process of fedgauge (server, client, worker,
command line, test) imports it before anything else can import torchvision.
"""

from fedgauge.client.torchvision_mend import mend_torchvision

mend_torchvision()
