"""What a client computes: the vocabulary of updates, the models, the data, and the Flower ClientApp.

Importing this package sees to it that torchvision can be imported beside a CPU build of torch. Every process of fedgauge
(server, client, worker, command line, test) imports it before anything else can import torchvision.
"""

from fedgauge.client.torchvision_mend import mend_when_imported

mend_when_imported()
