"""What a draft says of an upload."""

import pytest
from torch import nn

from fedgauge.attacks.base import Observation
from fedgauge.simulations.rehearsal.draft import Draft, say_what_differs


@pytest.mark.parametrize(("examples", "noted"), [(200, []), (4000, ["examples"])])
def test_as_many_steps_as_examples_are_no_batches(examples: int, noted: list[str]) -> None:
    """200 examples in 20 epochs of batches of 20 make 200 steps."""
    draft, facts = Draft(), {"sizes": [20] * 200}
    draft.add("[data]", "observed", batch_size=examples)
    model = nn.Linear(3, 2)
    came = Observation(1, 0, {}, {name: p.detach() for name, p in model.named_parameters()})
    say_what_differs(draft, came, 200, facts, model)
    assert [problem.code for problem in draft.problems] == noted
