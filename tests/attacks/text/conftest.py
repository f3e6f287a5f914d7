"""Sentences of the small grammar for the tests of attacks on text, which need the extra [text]."""

from importlib.util import find_spec

import pytest

from fedgauge.client.data.corpora import Text, phrases
from tests.attacks.text.small_text import LENGTH

collect_ignore_glob = [] if find_spec("transformers") else ["test_*.py"]


@pytest.fixture(scope="session")
def classified() -> Text:
    return phrases(LENGTH)


@pytest.fixture(scope="session")
def spoken() -> Text:
    return phrases(LENGTH, task="next_token")
