"""What to change after an exception of torch, whose words do not say it to somebody who never wrote vmap."""

from fedgauge.client.components import own_line

LONGEST = 120  # characters of an exception's own words; torch explains itself at length
TENSORS_ONLY = (
    "compute with tensors throughout: a number taken out of one (float(), .item(), .numpy(), `if` on a value) has left what can "
    "be differentiated and vectorised; torch.where, clamp and minimum do the same with tensors"
)
GENERATOR = (
    "draw with the generator that is handed over (torch.randn(..., generator=rng)), and declare in `mean` what remains without "
    "the noise (often the identity) and in `update_distribution` how it is distributed"
)
COPY = (
    "keep locks, open files, generators and tensors computed from others out of the module's attributes, or write "
    "__deepcopy__; dlg and idlg, bounds, and defenses and attacks of the model copy it"
)
_REMEDIES = (  # parts of torch's and Python's messages, the first that occurs decides
    (("cannot pickle", "support the deepcopy protocol"), COPY),
    ((".item()", "data-dependent", "Boolean value", "Can't call numpy()", "calling .numpy()", "aten::_local_scalar"), TENSORS_ONLY),
    (("random operation",), GENERATOR),
    (("setup_context", "generate_vmap_rule"), "give its autograd Function a setup_context and generate_vmap_rule = True"),
    (("mutate a captured", "in-place", "inplace"), "let it build new tensors in place of changing the ones that it is given"),
    (("Expected more than 1 value per channel",), 'set [model] mode = "eval", or a [data] batch_size of at least 2'),
    (("derivative for", "double backward", "is not implemented", "not differentiable twice"),
     "torch has no second derivative of this: use another layer or activation in its place, or attacks that do not descend"),
    (("out of memory", "can't allocate memory"), "take a smaller network, batch or wave"),
)  # fmt: skip


def remedy(error: BaseException, otherwise: str = "see the line of your own code that it names") -> str:
    """What to change after this exception."""
    text = str(error)
    return next((words for parts, words in _REMEDIES if any(part in text for part in parts)), otherwise)


def sentence(error: BaseException) -> str:
    """An exception as one short line, with the place in a user's code that raised it."""
    first = " ".join(str(error).split())
    short = first if len(first) <= LONGEST else first[:LONGEST].rsplit(" ", 1)[0] + " ..."
    return (f"{type(error).__name__}: {short}" if short else type(error).__name__) + own_line(error)
