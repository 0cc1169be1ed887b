"""Text comes out token by token, whole characters only, and never past a stop string."""

from __future__ import annotations

import random

import pytest
from tokenizers import AddedToken, decoders, models
from tokenizers import Tokenizer as Backend

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
    backend.add_special_tokens([AddedToken("<end>", special=True)])
    return backend


def byte_level_with_long_tokens() -> Backend:
    """Byte-level tokens of one to four bytes, which start and end anywhere in a character."""
    rng = random.Random(7)
    letters = bytes_to_unicode()
    text = "नमस्ते दुनिया 日本 é😀 abc".encode()
    chunks = [letters[byte] for byte in range(256)]
    for _ in range(200):
        start = rng.randrange(len(text) - 4)
        chunks.append("".join(letters[b] for b in text[start : start + rng.randrange(2, 5)]))
    backend = Backend(models.BPE({chunk: id for id, chunk in enumerate(dict.fromkeys(chunks))}, []))
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<end>", special=True)])
    return backend


def word_pieces() -> Backend:
    chunks = ["[UNK]", "do", "n't", ".", ",", "##ing", "##s", "run", "'s", "é", "##é"]
    backend = Backend(models.WordPiece({text: id for id, text in enumerate(chunks)}))
    backend.decoder = decoders.WordPiece(cleanup=True)
    backend.add_special_tokens([AddedToken("[SEP]", special=True)])
    return backend


def bytes_to_unicode() -> dict[int, str]:
    """The letter that byte-level tokens have for each byte."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    letters = {byte: chr(256 + number) for number, byte in enumerate(others)}
    return {byte: letters.get(byte, chr(byte)) for byte in range(256)}


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
        assert len(made.token_ids) - made.window_start <= 2 * MAX_PENDING_TOKENS
    assert len(made.text) > 400
    assert made.push(tokenizer.encode("z")[0]).endswith("z")


BACKENDS = {
    "byte level": byte_tokenizer,
    "byte level, long tokens": byte_level_with_long_tokens,
    "byte fallback": bytes_with_fallback,
    "word pieces": word_pieces,
}


def random_ids(rng: random.Random, tokenizer: Tokenizer) -> list[int]:
    """Of all tokens, with runs of a few, so that bytes become characters, valid and invalid ones."""
    ids: list[int] = []
    for _ in range(rng.randrange(1, 12)):
        few = [rng.randrange(tokenizer.vocab_size) for _ in range(rng.choice([1, 2, 1000]))]
        ids += rng.choices(few, k=rng.randrange(60))
        special = tokenizer.vocab_size - 1
        ids += [special] * rng.randrange(3)
        ids += tokenizer.encode("".join(rng.choices("aé日😀 ", k=rng.randrange(8))))
    return ids


@pytest.mark.covering
@pytest.mark.parametrize("seed", range(60))
@pytest.mark.parametrize("name", BACKENDS)
def test_text_does_not_depend_on_the_groups_of_tokens(name: str, seed: int) -> None:
    tokenizer, rng = wrapped(BACKENDS[name]()), random.Random(seed)
    ids, prompt = random_ids(rng, tokenizer), random_ids(rng, tokenizer)[: rng.choice([0, 9])]
    skip, stops = rng.random() < 0.5, rng.choice([(), ("\N{REPLACEMENT CHARACTER}a", "zz")])
    single = Detokenizer(tokenizer, stops, 0, skip, prompt)
    for token in ids:
        if single.stopped_by is None:
            single.push(token)
    single.finish()
    for _ in range(5):
        grouped, rest = Detokenizer(tokenizer, stops, 0, skip, prompt), ids
        longest = rng.choice([2, 5, 50, 500])
        while rest and grouped.stopped_by is None:
            size = rng.randrange(1, longest)
            grouped.push_all(rest[:size])
            rest = rest[size:]
        grouped.finish()
        assert (grouped.text, grouped.stopped_by) == (single.text, single.stopped_by)
        assert grouped.token_ids == single.token_ids
    if name.startswith("byte level") and not stops and not prompt:
        assert single.text == tokenizer.decode(ids, skip)


def test_invalid_bytes_in_large_groups_are_decoded_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A server writes many tokens at once: each decoded alone took most of its time."""
    calls: list[int] = []
    decode = Tokenizer.decode

    def count(tokenizer: Tokenizer, ids: list[int], skip_special_tokens: bool = True) -> str:
        calls.append(len(ids))
        return decode(tokenizer, ids, skip_special_tokens)

    monkeypatch.setattr(Tokenizer, "decode", count)
    tokenizer, rng = wrapped(byte_level_with_long_tokens()), random.Random(4)
    tokens = [rng.choice([*range(64, 90), rng.randrange(256)]) for _ in range(480)]
    made = Detokenizer(tokenizer)
    made.push_all(tokens)
    assert "\N{REPLACEMENT CHARACTER}" in made.text
    assert len(calls) < 120 and sum(calls) < 4 * len(tokens)


def test_tokens_that_all_end_inside_a_character() -> None:
    """Byte-level merges cross characters in scripts whose characters share their first bytes."""
    letters, text = bytes_to_unicode(), "नमस्ते" * 40
    data = text.encode()
    ids = {letter: id for id, letter in letters.items()}
    chunks = [data[:2], *(data[start : start + 3] for start in range(2, len(data), 3))]
    words = ["".join(letters[byte] for byte in chunk) for chunk in chunks]
    backend = Backend(
        models.BPE({word: id for id, word in enumerate({**ids, **dict.fromkeys(words)})}, [])
    )
    backend.decoder = decoders.ByteLevel()
    tokenizer = wrapped(backend)
    made, tokens = Detokenizer(tokenizer), [backend.token_to_id(word) for word in words]
    for count, token in enumerate(tokens):
        made.push(token)
        assert made.text == text[:count]
    made.finish()
    assert made.text == text


def test_emoji_in_groups_of_byte_tokens() -> None:
    tokenizer, text = wrapped(bytes_with_fallback()), "😀😀😀 é日本 a"
    ids = tokenizer.encode(text.replace(" ", "▁"))
    for size in range(1, len(ids)):
        made = Detokenizer(tokenizer)
        for start in range(0, len(ids), size):
            made.push_all(ids[start : start + size])
        made.finish()
        assert made.text == text


def test_an_invalid_byte_does_not_change_emitted_text() -> None:
    tokenizer = wrapped(bytes_with_fallback())
    made = Detokenizer(tokenizer)
    ids = [*tokenizer.encode("é"), tokenizer.token_id("<0xFF>"), tokenizer.token_id("a")]
    chunks = [made.push(token) for token in ids]
    assert chunks == ["", "é", "", "\N{REPLACEMENT CHARACTER}a"]


def test_a_space_after_special_tokens_is_kept() -> None:
    tokenizer = wrapped(bytes_with_fallback())
    special = tokenizer.token_id("<end>")
    made = Detokenizer(tokenizer)
    ids = [*tokenizer.encode("a"), *[special] * 40, *tokenizer.encode("▁b")]
    assert "".join(made.push(token) for token in ids) == tokenizer.decode(ids) == "a b"
    made = Detokenizer(tokenizer)
    made.push_all(ids)
    assert made.text == "a b" and made.token_ids == ids


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
