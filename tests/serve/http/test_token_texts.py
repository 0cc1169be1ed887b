"""Texts of single tokens are those inside of a text, and their bytes join to it."""

from __future__ import annotations

from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers

from fulgurite.models.tokenizer import Tokenizer
from fulgurite.serve.engine.detokenizer import Detokenizer
from fulgurite.serve.http.api.completions import TextOffsets
from fulgurite.serve.http.token_texts import TokenTexts


def sentencepiece() -> Tokenizer:
    """Words with their space, bytes, and a decoder that drops the first space of a text."""
    pieces = [
        "<unk>",
        "<s>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "▁",
        "a",
        "▁ab",
        "▁cd",
        "e",
    ]
    vocabulary = {text: id for id, text in enumerate(pieces)}
    merges = []
    backend = Backend(models.BPE(vocabulary, merges, byte_fallback=True, unk_token="<unk>"))
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)])
    backend.add_special_tokens(["<s>"])
    return Tokenizer(backend, 1, (), None, {})


def find_ids(tokenizer: Tokenizer, *pieces: str) -> list[int]:
    ids = [tokenizer.token_id(piece) for piece in pieces]
    assert None not in ids
    return [id for id in ids if id is not None]


def test_tokens_keep_their_space() -> None:
    tokenizer = sentencepiece()
    texts = TokenTexts(tokenizer)
    ab, cd, e, half = find_ids(tokenizer, "▁ab", "▁cd", "e", "<0xC3>")
    assert [texts[token][0] for token in (ab, cd, e)] == [" ab", " cd", "e"]
    assert texts[cd][1] == list(b" cd") and texts[half][1] == [0xC3]
    assert texts.name(half) == "bytes:\\xc3" and texts.name(cd) == " cd"
    assert texts.is_special(1) and not texts.is_special(cd)


def test_offsets_leave_out_special_tokens_and_the_added_space() -> None:
    tokenizer = sentencepiece()
    ids = find_ids(tokenizer, "<s>", "▁ab", "▁cd", "<0xC3>", "<0xA9>", "e")
    offsets = TextOffsets(TokenTexts(tokenizer), tokenizer.decode(ids))
    assert tokenizer.decode(ids) == "ab cdée"
    assert [offsets.add(token) for token in ids] == [0, 0, 2, 5, 5, 6]


def test_a_reply_that_goes_on_from_a_text_keeps_its_first_space() -> None:
    tokenizer = sentencepiece()
    ab, cd, half = find_ids(tokenizer, "▁ab", "▁cd", "<0xC3>")
    assert Detokenizer(tokenizer).push(cd) == "cd"
    made = Detokenizer(tokenizer, ["d"], prompt_ids=[1, ab])
    assert made.push(cd) + made.finish() == " c" and made.stopped_by == "d"
    made = Detokenizer(tokenizer, prompt_ids=[ab] * 9)
    assert [made.push(token) for token in (cd, ab, half)] == [" cd", " ab", ""]
    assert made.token_ids == [cd, ab, half]
    assert Detokenizer(tokenizer, prompt_ids=[ab, half]).push(cd) == "cd"  # no text to go on from
