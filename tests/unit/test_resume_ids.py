"""An id continues one answer for one client, for five minutes, and nothing else passes for one."""

import time
from dataclasses import replace

import pytest

from millrace.errors import GoneError, InvalidRequestError
from millrace.rpc.call_context import CallContext
from services.transformer.generation import resume_ids
from services.transformer.generation.resume_ids import MAX_AGE_S, ResumeIds, ResumePoint, checksum, identity_of

WEIGHTS = "0123456789abcdef" * 2
BODY = b'{"prompt": "Once", "stream": true}'
LARGE = b"x" * (1 << 20)


def call(client="", key=None):
    metadata = (("x-millrace-client", client),) if client else ()
    return CallContext("", "", metadata if key is None else (*metadata, ("idempotency-key", key)))


async def begun(body=BODY, client="", weights=WEIGHTS, **options):
    """An answer's identity, and its ids after three tokens."""
    identity = await identity_of(call(client, **options), body, has_ids=True)
    ids = ResumeIds(identity)
    ids.take(weights, [5])
    ids.take(weights, [7, 2])
    return identity, ids


@pytest.mark.parametrize("stage", ["", "f", "u"])
@pytest.mark.parametrize("body", [BODY, b"", LARGE], ids=["a body", "no body", "a large body"])
async def test_an_id_has_what_continues_its_answer(stage, body):
    identity, ids = await begun(body, client="alice")
    resumed = await identity_of(call("alice"), body, ids.id(stage), has_ids=True)
    assert resumed == replace(identity, resume=ResumePoint(WEIGHTS, 3, checksum([5, 7, 2]), stage))
    assert (resumed.seed, resumed.answer_id) == (identity.seed, identity.answer_id)
    assert ids.line(stage) == f"id: {ids.id(stage)}\n".encode()


async def test_ids_of_a_continued_answer_continue_it_again():
    _, ids = await begun()
    resumed = ResumeIds(await identity_of(call(), BODY, ids.id(), has_ids=True))
    resumed.take(WEIGHTS, [5, 7, 2])
    assert resumed.id() == ids.id()


@pytest.mark.parametrize("weights", ["", "v1", WEIGHTS.upper(), WEIGHTS + "0"])
async def test_an_answer_of_unknown_weights_has_no_ids(weights):
    _, ids = await begun(weights=weights)
    ids.take(weights, [1 << 40])  # No id of ours, but that of another server.
    assert (ids.id(), ids.line()) == ("", b"")


async def test_another_client_or_body_is_refused():
    _, ids = await begun(client="alice")
    for who, body in (("bob", BODY), ("", BODY), ("alice", BODY + b" ")):
        with pytest.raises(InvalidRequestError, match="damaged or of another request"):
            await identity_of(call(who), body, ids.id(), has_ids=True)


async def test_no_damaged_id_passes():
    _, ids = await begun()
    head, *rest = ids.id("f").split(".")
    for at in range(len(head)):
        other = head[:at] + ("B" if head[at] == "A" else "A") + head[at + 1 :]
        # The last character has two bits that mean nothing.
        if at < len(head) - 1:
            with pytest.raises(InvalidRequestError):
                await identity_of(call(), BODY, ".".join([other, *rest]), has_ids=True)
    whole = ids.id("f")
    wrong = [whole[:-1] + "x", whole[1:], whole + "." + rest[-1], whole.replace("f.", "g."), "7", "é" * 54, " " + whole]
    for other in (*wrong, whole + "\n", "x" * 10_000):
        with pytest.raises(InvalidRequestError, match="not an id of this server"):
            await identity_of(call(), BODY, other, has_ids=True)


async def test_an_id_is_as_old_as_its_event_not_as_its_answer(monkeypatch):
    identity, ids = await begun()
    early = ids.id()
    now = time.time()
    monkeypatch.setattr(resume_ids.time, "time", lambda: now + 2 * MAX_AGE_S)
    late = ids.id()
    for age_s in (2, 2.9):
        monkeypatch.setattr(resume_ids.time, "time", lambda age_s=age_s: now + age_s * MAX_AGE_S)
        assert (await identity_of(call(), BODY, late, has_ids=True)).created == identity.created
        with pytest.raises(GoneError, match="older than 300 seconds"):
            await identity_of(call(), BODY, early, has_ids=True)


async def test_a_key_gives_the_same_answer_to_the_same_client_and_body_alone():
    first, _ = await begun(key="k", client="alice")
    again = await identity_of(call("alice", "k"), BODY, has_ids=False)
    assert (again.seed, again.answer_id) == (first.seed, first.answer_id)
    for who, key, body in (("bob", "k", BODY), ("alice", "l", BODY), ("alice", "k", LARGE), ("alice", None, BODY)):
        other = await identity_of(call(who, key), body, has_ids=False)
        assert other.seed != first.seed
        assert other.answer_id != first.answer_id


async def test_answers_without_a_key_differ():
    identities = [await identity_of(call(), BODY, has_ids=False) for _ in range(50)]
    assert len({identity.seed for identity in identities}) == len({one.answer_id for one in identities}) == 50
    assert all(0 <= identity.seed < 2**63 and len(identity.answer_id) == 32 for identity in identities)


async def test_a_key_has_a_length():
    await identity_of(call(key="k" * 255), BODY, has_ids=False)
    with pytest.raises(InvalidRequestError, match="at most 255"):
        await identity_of(call(key="k" * 256), BODY, has_ids=False)
