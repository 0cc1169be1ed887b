"""A reply that grows: a sampled token in; its text, the tokens that the grammar forces after it, and
whether the reply ends, out.

    sampled ─▶ grammar accepts ─▶ text, stop strings ─▶ ends?   ┐ for each forced token
                     ▲                                          │ as well
                     └────────── forced tokens of the grammar ◀─┘

Forced tokens are appended as if they were sampled, and the next step computes them together. A token
that the request bans is not forced. Requests with logprobs get no forced tokens, since a token that no
step samples has no log-probability; nor do those with prompt_logprobs, which a step must compute first.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from fulgurite.serve.engine.detokenizer import Detokenizer
from fulgurite.serve.engine.request import Request


class ReplyEnd(NamedTuple):
    """Why a reply ends; see `Result`."""

    reason: str
    stopped_by: str | int | None = None
    error: str | None = None


class Progress(NamedTuple):
    """What a token added to a reply. `num_forced` of the tokens were forced."""

    text: str
    token_ids: tuple[int, ...]
    num_forced: int
    end: ReplyEnd | None


def advance_reply(
    request: Request, detokenizer: Detokenizer | None, sampled: int | None
) -> Progress:
    """Process a token that was sampled and appended, and what is forced after it.

    None: nothing was sampled yet, but the grammar may force the beginning.
    """
    text, tokens = "", [] if sampled is None else [sampled]
    end: ReplyEnd | None = None
    if sampled is not None:
        text, end = process_token(request, detokenizer, sampled)
    elif request.grammar is not None and request.grammar.is_complete:
        end = ReplyEnd("stop")
    num_forced = 0
    if end is None:
        forced, end = find_forced_tokens(request)
        for token in forced:
            if end is not None or not may_force(request, token):
                break
            request.append(token, is_forced=True)
            tokens.append(token)
            num_forced += 1
            more, end = process_token(request, detokenizer, token)
            text += more
    if end is None and request.grammar is not None:
        request.grammar.start_mask()
    request.num_reported = request.length
    return Progress(text, tuple(tokens), num_forced, end)


def process_token(
    request: Request, detokenizer: Detokenizer | None, token: int
) -> tuple[str, ReplyEnd | None]:
    """The new text, and whether the reply ends with this token, the last one of the request."""
    error = accept_token(request, token)
    if error is not None:
        return "", error
    if token in request.stop_ids:
        return "", ReplyEnd("stop", token)
    text = "" if detokenizer is None else detokenizer.push(token)
    end = None
    if detokenizer is not None and detokenizer.stopped_by is not None:
        end = ReplyEnd("stop", detokenizer.stopped_by)
    elif request.grammar is not None and request.grammar.is_complete:
        end = ReplyEnd("stop")
    elif request.length == request.max_length:
        end = ReplyEnd("length")
    return text, end


def accept_token(request: Request, token: int) -> ReplyEnd | None:
    """Advance the grammar of a request; the end of the reply if the grammar raises."""
    if request.constraint is not None:
        try:
            request.constraint.accept_token(token)
        except Exception as error:  # a grammar may raise anything; it concerns this request only
            return describe_error(request, error)
    return None


def find_forced_tokens(request: Request) -> tuple[list[int], ReplyEnd | None]:
    """The tokens that must come next; or the end of the reply, if the grammar raises."""
    params = request.params
    if params.logprobs is not None or params.prompt_logprobs is not None or request.grammar is None:
        return [], None
    try:
        return request.grammar.forced_tokens(), None
    except Exception as error:  # the same
        return [], describe_error(request, error)


def may_force(request: Request, token: int) -> bool:
    """Whether the settings of the request allow the token. If not, it is left to sampling."""
    params = request.params
    if params.allowed_token_ids is not None and token not in params.allowed_token_ids:
        return False
    if token in params.banned_token_ids or params.logit_bias.get(token) == -math.inf:
        return False
    reply_length = request.length - request.prompt_length
    return token not in request.stop_ids or reply_length >= params.min_tokens


def describe_error(request: Request, error: Exception) -> ReplyEnd:
    message = f"{request.id}, token {request.length}: {str(error) or type(error).__name__}"
    return ReplyEnd("error", error=message)
