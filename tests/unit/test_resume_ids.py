"""An id continues one answer for one client, for five minutes, and nothing else passes for one."""

import time
from dataclasses import replace

import pytest

from headrace.errors import GoneError, InvalidRequestError
from headrace.rpc.server.call_context import CallContext
from headrace_transformer.generation import resume_ids
from headrace_transformer.generation.resume_ids import (
    MAX_AGE_S,
    ResumeIds,
    ResumePoint,
    Signer,
    checksum,
    identity_of,
    signer_of,
)

WEIGHTS = "0123456789abcdef" * 2
BODY = b'{"prompt": "Once", "stream": true}'
LARGE = b"x" * (1 << 20)


def call(client="", key=None):
    metadata = (("x-headrace-client", client),) if client else ()
    return CallContext("", "", metadata if key is None else (*metadata, ("idempotency-key", key)))


SIGNER = Signer(b"a key")


async def identity(*arguments, signer=SIGNER, **options):
    return await identity_of(*arguments, signer=signer, **options)


async def begun(body=BODY, client="", weights=WEIGHTS, **options):
    """An answer's identity, and its ids after three tokens."""
    begun_identity = await identity(call(client, **options), body, has_ids=True)
    ids = ResumeIds(begun_identity)
    ids.take(weights, [5])
    ids.take(weights, [7, 2])
    return begun_identity, ids


@pytest.mark.parametrize("stage", ["", "f", "u"])
@pytest.mark.parametrize("body", [BODY, b"", LARGE], ids=["a body", "no body", "a large body"])
async def test_an_id_has_what_continues_its_answer(stage, body):
    first, ids = await begun(body, client="alice")
    resumed = await identity(call("alice"), body, ids.id(stage), has_ids=True)
    assert resumed == replace(first, resume=ResumePoint(WEIGHTS, 3, checksum([5, 7, 2]), stage))
    assert (resumed.seed, resumed.answer_id) == (first.seed, first.answer_id)
    assert ids.line(stage) == f"id: {ids.id(stage)}\n".encode()


@pytest.mark.parametrize("weights", ["", "v1", WEIGHTS.upper(), WEIGHTS + "0"])
async def test_an_answer_of_unknown_weights_has_no_ids(weights):
    _, ids = await begun(weights=weights)
    ids.take(weights, [1 << 40])  # No id of ours, but that of another server.
    assert (ids.id(), ids.line()) == ("", b"")


async def test_another_client_or_body_is_refused():
    _, ids = await begun(client="alice")
    for who, body in (("bob", BODY), ("", BODY), ("alice", BODY + b" ")):
        with pytest.raises(InvalidRequestError, match="damaged or of another request"):
            await identity(call(who), body, ids.id(), has_ids=True)


async def test_no_damaged_id_passes():
    _, ids = await begun()
    head, *rest = ids.id("f").split(".")
    for at in range(len(head)):
        other = head[:at] + ("B" if head[at] == "A" else "A") + head[at + 1 :]
        # The last character has two bits that mean nothing.
        if at < len(head) - 1:
            with pytest.raises(InvalidRequestError):
                await identity(call(), BODY, ".".join([other, *rest]), has_ids=True)
    whole = ids.id("f")
    *_, age, signature = whole.split(".")
    for forged in (f"{int(age) + 600}.{signature}", f"{age}.{'0' * 16}"):
        with pytest.raises(InvalidRequestError, match="damaged or of another request"):
            await identity(call(), BODY, whole.removesuffix(f"{age}.{signature}") + forged, has_ids=True)
    wrong = [whole[:-1] + "x", whole[1:], whole + "." + rest[-1], whole.replace("f.", "g."), "7", "é" * 54, " " + whole]
    for other in (*wrong, whole + "\n", "x" * 10_000):
        with pytest.raises(InvalidRequestError, match="not an id of this server"):
            await identity(call(), BODY, other, has_ids=True)


async def test_an_id_is_as_old_as_its_event_not_as_its_answer(monkeypatch):
    first, ids = await begun()
    early = ids.id()
    now = time.time()
    monkeypatch.setattr(resume_ids.time, "time", lambda: now + 2 * MAX_AGE_S)
    late = ids.id()
    for age_s in (2, 2.9):
        monkeypatch.setattr(resume_ids.time, "time", lambda age_s=age_s: now + age_s * MAX_AGE_S)
        assert (await identity(call(), BODY, late, has_ids=True)).created == first.created
        with pytest.raises(GoneError, match="older than 300 seconds"):
            await identity(call(), BODY, early, has_ids=True)


@pytest.mark.parametrize("has_ids", [False, True])
async def test_answers_without_a_key_differ(has_ids):
    identities = [await identity(call(), BODY, has_ids=has_ids) for _ in range(9)]
    assert len({one.seed for one in identities}) == len({one.answer_id for one in identities}) == 9


async def test_an_id_of_another_stack_is_refused_and_a_kept_key_is_shared(tmp_path):
    folder = tmp_path / "spool"
    kept = signer_of(None, folder)
    ids = ResumeIds(await identity(call(), BODY, signer=kept, has_ids=True))
    ids.take(WEIGHTS, [5])
    assert (await identity(call(), BODY, ids.id(), signer=signer_of(None, folder), has_ids=True)).resume is not None
    for other in (signer_of("0123456789abcdef", folder), signer_of(None, tmp_path / "other"), Signer()):
        with pytest.raises(InvalidRequestError, match="damaged or of another request"):
            await identity(call(), BODY, ids.id(), signer=other, has_ids=True)
    assert [path.name for path in folder.iterdir()] == ["signing-key"]
    (folder / "signing-key").write_bytes(b"cut")  # By a full disk.
    signer_of(None, folder)
    assert (folder / "signing-key").stat().st_size == 32
    (tmp_path / "file").touch()
    assert signer_of(None, tmp_path / "file" / "spool").sign(b"age", b"") != kept.sign(b"age", b"")
