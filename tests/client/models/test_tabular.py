"""Networks of rows: a category's vector is a lookup, features are tokens, and both learn."""

from typing import Any

import pytest
import torch
from torch import nn

from fedgauge.client.data.tables import census
from fedgauge.client.models.tabular import embedding_mlp, ft_transformer

DATA = census("scaled")


def test_embedded_categories_are_those_that_a_lookup_gives() -> None:
    model: Any = embedding_mlp(DATA.columns, 2, dimension=3)
    x, cells = DATA.x[:20], DATA.columns.cells(DATA.x[:20])
    found = model.categories(x)
    categorical = [i for i, column in enumerate(DATA.columns) if not column.numeric]
    for vectors, table, i in zip(found, model.categories.tables, categorical, strict=True):
        assert torch.allclose(vectors, nn.functional.embedding(cells[:, i].long(), table.weight.T), atol=1e-5)


@pytest.mark.parametrize("make", [embedding_mlp, ft_transformer])
def test_it_learns_the_census_and_treats_rows_separately(make: Any) -> None:
    model = make(DATA.columns, 2)
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    for step in range(60):
        at = slice(50 * step, 50 * step + 50)
        loss = nn.functional.cross_entropy(model(DATA.x[at]), DATA.y[at])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        logits = model(DATA.x_test[:400])
        assert torch.allclose(logits[:3], model(DATA.x_test[:3]), atol=1e-4)
    assert float((logits.argmax(1) == DATA.y_test[:400]).double().mean()) > 0.7
