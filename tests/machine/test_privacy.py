"""What no report may hold."""

import pytest

from foretune.machine import Private, private_words

ALICE = Private(home="/home/alice", names=frozenset({"alice", "node-17.example.org", "node-17"}), secrets=("s3cr3t!",))


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("/home/alice/runs", "~/runs"),
        ("/mnt/alice/runs", "/mnt/(hidden)/runs"),
        ("alice's", "(hidden)'s"),
        ("malice", "m(hidden)"),
        ("on node-17.example.org", "on (hidden)"),
        ("--password=s3cr3t!", "--password=(hidden)"),
        ("hf_abcdefghijklmnop", "(hidden)"),
        ("https://me:pw@host/x", "https(hidden)host/x"),
        ("GPU-8f1c9b1e-0000-1111-2222-333344445555", "(hidden)"),
        ("00000000:3B:00.0", "(hidden)"),
        ("NVIDIA GeForce RTX 3090", "NVIDIA GeForce RTX 3090"),
        ("python3.12", "python3.12"),
        ("a\x1b[2J\u202eb", "a\\x1b[2J\\u202eb"),
    ],
)
def test_foreign_text_loses_what_is_private_and_nothing_else(text: str, shown: str) -> None:
    assert ALICE.foreign(text) == shown


def test_private_words_are_those_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: "box9.lan")
    private = private_words({"HOME": "/x", "USER": "bob7", "GITHUB_TOKEN": "abcd1234", "PATH": "/usr/bin"})
    assert private.foreign("bob7 box9.lan box9 abcd1234 /usr/bin") == "(hidden) (hidden) (hidden) (hidden) /usr/bin"


def test_a_setting_of_tokenizers_is_no_secret() -> None:
    assert private_words({"TOKENIZERS_PARALLELISM": "false"}).foreign("false") == "false"


def test_root_is_nobodys_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: "localhost")
    assert private_words({"USER": "root"}).foreign("root localhost") == "root localhost"


def test_long_texts_are_cut() -> None:
    assert len(ALICE.foreign("x" * 5000)) == 300
