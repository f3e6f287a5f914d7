"""What a client computes: the vocabulary of updates, the models, the data, and the Flower ClientApp.

Importing this package sees to it that torchvision can be imported beside a CPU build of torch, and that torch keeps what it
compiles in a folder of this user alone. Every process of fedgauge (server, client, worker, command line, test) imports it before
anything else can import torchvision or compile.
"""

from fedgauge.client.cache_folder import keep_compiled_code
from fedgauge.client.models.torchvision_mend import mend_when_imported

mend_when_imported()
keep_compiled_code()
