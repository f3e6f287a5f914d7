"""The client side: updates, models, data, and the Flower ClientApp.

Importing this package makes torchvision importable with a CPU build of torch, and gives torch a private folder for what it
compiles. Every process of fedgauge (server, client, worker, command line, test) imports it before
anything else can import torchvision or compile.
"""

from fedgauge.client.cache_folder import keep_compiled_code
from fedgauge.client.models.torchvision_mend import mend_when_imported

mend_when_imported()
keep_compiled_code()
