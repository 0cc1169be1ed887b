"""Text comes out token by token, whole characters only, and never past a stop string."""

from __future__ import annotations

import random

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models

from fulgurite.models.tokenizer import Tokenizer
from fulgurite.serve.engine.detokenizer import MAX_PENDING_TOKENS, Detokenizer
from tests.serve.tiny_checkpoint import byte_tokenizer

TEXTS = [
    "plain ascii, with  spaces\n\n and lines",
    "naïve café: ½ × ∑ ≠ 日本語 한국어 العربية",
    "👩‍👩‍👧‍👦 families 🇫🇷 flags e\u0301 accents",
    "a real \N{REPLACEMENT CHARACTER} in the text \N{REPLACEMENT CHARACTER}\N{REPLACEMENT CHARACTER}",
]


def bytes_with_fallback() -> Backend:
    """SentencePiece's way: a token a character it knows, <0x..> tokens for other bytes."""
    chunks = [
        "<unk>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "▁",
        *"abcdefghijklmnopqrstuvwxyz",
    ]
    backend = Backend(
        models.BPE(
            {text: id for id, text in enumerate(chunks)}, [], byte_fallback=True, unk_token="<unk>"
        )
    )
    steps = [
        decoders.Replace("▁", " "),
        decoders.ByteFallback(),
        decoders.Fuse(),
        decoders.Strip(" ", 1, 0),
    ]
    backend.decoder = decoders.Sequence(steps)
    return backend


def wrapped(backend: Backend) -> Tokenizer:
    return Tokenizer(backend, None, (), None, {})


@pytest.fixture(params=["byte level", "byte fallback"])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    return wrapped(byte_tokenizer() if request.param == "byte level" else bytes_with_fallback())


@pytest.mark.parametrize("text", TEXTS)
def test_emitted_text_concatenates_to_the_full_text(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    made = Detokenizer(tokenizer)
    chunks = [made.push(token) for token in ids]
    for chunk in chunks:
        assert "\N{REPLACEMENT CHARACTER}" not in chunk or "\N{REPLACEMENT CHARACTER}" in text
    chunks.append(made.finish())
    assert "".join(chunks) == made.text == tokenizer.decode(ids)


def test_incomplete_character_is_held_back(tokenizer: Tokenizer) -> None:
    made = Detokenizer(tokenizer)
    ids = tokenizer.encode("a😀b")
    shown = [made.push(token) for token in ids]
    assert [chunk for chunk in shown if chunk] == ["a", "😀", "b"]


def test_incomplete_character_at_the_end_is_emitted(tokenizer: Tokenizer) -> None:
    made = Detokenizer(tokenizer)
    ids = tokenizer.encode("a😀")[:-2]
    assert "".join(made.push(token) for token in ids) == "a"
    assert made.finish() == tokenizer.decode(ids)[1:]


def test_invalid_utf8_is_emitted_eventually(tokenizer: Tokenizer) -> None:
    made = Detokenizer(tokenizer)
    lead = tokenizer.encode("😀")[0]
    for _ in range(500):
        made.push(lead)
        assert len(made.token_ids) - made.decode_start <= 2 * MAX_PENDING_TOKENS
    assert len(made.text) > 400
    assert made.push(tokenizer.encode("z")[0]).endswith("z")


@pytest.mark.parametrize("stops", [("END",), ("EN", "END"), ("ND", "xEND"), ("\n\n", "END")])
def test_stop_string_across_tokens(stops: tuple[str, ...]) -> None:
    tokenizer = wrapped(byte_tokenizer())
    made, shown = Detokenizer(tokenizer, stops), ""
    for token in tokenizer.encode("EN route, E, then EENxEND and more"):
        if made.stopped_by is None:
            shown += made.push(token)
    shown += made.finish()
    text = "EN route, E, then EENxEND and more"
    first = min((text.find(stop), stop) for stop in stops if stop in text)
    assert shown == made.text == text[: first[0]] and made.stopped_by == first[1]


def test_held_text_is_emitted_at_the_end() -> None:
    tokenizer = wrapped(byte_tokenizer())
    made = Detokenizer(tokenizer, ["STOP"])
    assert "".join(made.push(token) for token in tokenizer.encode("a STO")) == "a "
    assert made.finish() == "STO" and made.text == "a STO" and made.stopped_by is None


def test_random_bytes_and_stops() -> None:
    """Against the plain definition on the whole text."""
    rng, tokenizer = random.Random(1), wrapped(byte_tokenizer())
    for _ in range(200):
        text = "".join(rng.choice("abé😀") for _ in range(rng.randrange(30)))
        stops = ["".join(rng.choice("abé😀") for _ in range(rng.randrange(1, 4))) for _ in range(2)]
        made, shown = Detokenizer(tokenizer, stops), ""
        for token in tokenizer.encode(text):
            if made.stopped_by is None:
                shown += made.push(token)
        shown += made.finish()
        ends = [text.find(stop) + len(stop) for stop in stops if stop in text]
        seen = text[: min(ends)] if ends else text  # the first stop string that is complete ends it
        wanted = min((seen.find(stop) for stop in stops if stop in seen), default=len(text))
        assert shown == text[:wanted]
