"""A small language: some thousand short sentences, private ones and those of work, from a grammar of a few lines."""

from collections.abc import Iterator
from hashlib import blake2b
from itertools import count

PRIVATE, WORK = 0, 1
COUNT = 4000  # sentences, half of each class

_SHARED = {
    "time": "today tomorrow tonight soon again early later",
    "day": "monday tuesday wednesday thursday friday saturday sunday",
    "many": "two three four five six seven eight nine ten twelve",
    "look": "new old big small broken lost missing heavy cheap secret strange empty late first last final second spare",
    "how": "quickly slowly quietly carefully gladly secretly",
    "ask": "please could you|please|can you|will you|you should|we must|i will|do not forget to|try to",
    "say": "says|thinks|knows|hopes|hears|writes",
}
_OWN: dict[int, dict[str, str]] = {
    PRIVATE: {
        "who": "mother father sister brother aunt uncle cousin niece nephew grandmother grandfather daughter son wife husband "
        "neighbour roommate friend dentist doctor nurse teacher baker gardener babysitter",
        "what": "cake piano garden sofa medicine passport bicycle guitar kitten puppy necklace suitcase camera umbrella blanket "
        "diary kitchen lamp soup bread cheese apple pillow mirror sweater scarf candle ladder basket violin "
        "aquarium toaster carpet curtain mattress",
        "where": "beach lake forest market church hospital playground cinema bakery zoo station island village harbour "
        "museum pharmacy library balcony cellar attic",
        "do": "bake wash paint water hug feed carry clean repair borrow hide wrap knit cook mend",
        "did": "baked washed painted watered broke fed carried cleaned repaired borrowed hid wrapped found loved cooked",
        "feel": "sick happy tired pregnant lonely hungry asleep proud afraid divorced jealous thirsty homesick engaged",
        "event": "birthday wedding funeral picnic holiday party concert dinner christening surgery vaccination anniversary",
    },
    WORK: {
        "who": "manager client lawyer accountant engineer designer assistant director supplier customer colleague auditor "
        "recruiter analyst consultant secretary intern editor broker contractor chairman investor partner inspector",
        "what": "contract invoice budget report server schedule proposal password database spreadsheet patent printer "
        "agenda payroll ledger forecast licence audit tender shipment warehouse prototype brochure newsletter "
        "archive backup firewall keyboard projector survey invoice template memo receipt",
        "where": "office factory laboratory workshop conference boardroom showroom depot terminal reception branch "
        "headquarters courtroom agency bank studio plant archive",
        "do": "sign review approve print deliver cancel submit postpone negotiate publish encrypt copy update file test",
        "did": "signed reviewed approved printed delivered cancelled submitted postponed negotiated published encrypted "
        "copied updated filed tested",
        "feel": "busy overdue bankrupt overpaid underpaid promoted dismissed competent retired transferred unavailable insured",
        "event": "meeting interview deadline merger presentation workshop negotiation inspection launch training strike takeover",
    },
}
_TEMPLATES = (
    "my <who> <did> the <look> <what> <time>",
    "the <who> <did> <many> <what>s in the <where>",
    "<ask> <do> the <what> before the <event>",
    "<ask> <do> the <look> <what> with my <who> <time>",
    "our <who> is <feel> and the <what> is <look>",
    "i am <feel> since the <event> on <day>",
    "your <who> <say> that the <what> is in the <where>",
    "the <event> at the <where> begins on <day>",
    "who <did> the <what> of the <who> so <how>",
    "my <who> and your <who> <did> a <what> <how>",
    "call the <who> about the <look> <what>",
    "where is the <what> that my <who> <did>",
    "the <who> is <feel>",
    "my <what> is <look>",
    "who <did> your <what>",
    "the <who> <did> it <how>",
    "<do> the <what> <time>",
    "the <look> <what> is in the <where>",
    "the <who> <say> your <who> is <feel> <time>",
    "we met the <who> at the <where> after the <event>",
)


def sentences() -> list[tuple[str, int]]:
    """Distinct sentences of 4 to 12 words with their classes, the same on every machine, the classes taking turns."""
    found: dict[str, int] = {}
    # the same for ever
    draw = (int.from_bytes(blake2b(b"phrases %d" % i, digest_size=8).digest(), "big") for i in count())
    while len(found) < COUNT:
        kind = len(found) % 2
        sentence = " ".join(_filled(word, kind, draw) for word in _pick(_TEMPLATES, draw).split())
        found.setdefault(sentence, kind)
    return list(found.items())


def _filled(word: str, kind: int, draw: Iterator[int]) -> str:
    """Replace a template's word in brackets by one from its list."""
    if not word.startswith("<"):
        return word
    name, _, ending = word[1:].partition(">")
    choices = _SHARED.get(name) or _OWN[kind][name]
    return _pick(tuple(choices.split("|" if "|" in choices else None)), draw) + ending


def _pick(choices: tuple[str, ...], draw: Iterator[int]) -> str:
    return choices[next(draw) % len(choices)]
