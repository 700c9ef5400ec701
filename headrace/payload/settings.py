"""The settings of a service that records requests: where records wait for the logger, and what they contain."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated

from pydantic import ByteSize, Field, InstanceOf
from pydantic_settings import NoDecode

from headrace.payload.redaction import Redaction, parse_redactions
from headrace.payload.rules import Digest, PayloadRules, parse_metadata, parse_modes
from headrace.settings import ServiceSettings, read_by

LogModes = Annotated[InstanceOf[PayloadRules], NoDecode, read_by(parse_modes)]
Redactions = Annotated[tuple[InstanceOf[Redaction], ...], NoDecode, read_by(parse_redactions)]
LoggedMetadata = Annotated[frozenset[str], NoDecode, read_by(parse_metadata)]


class RecordingSettings(ServiceSettings):
    logger: str = Field("127.0.0.1:9002", description="Address of the payload logger.")
    payload_spool: Path = Field(
        Path(".run/spool"), description="Folder in which records wait for the logger; created if missing."
    )
    payload_spool_max: ByteSize = Field(
        ByteSize(1 << 30),
        ge=1 << 20,
        description="Maximum size of the folder of records for each process; further records are dropped and counted.",
    )
    payload_spool_fsync: bool = Field(
        False, description="Write records through to the disk, so that they survive a power failure."
    )
    payload_queue_memory: ByteSize = Field(
        ByteSize(64 << 20),
        gt=0,
        description=(
            "Maximum memory of records that wait to be written to that folder; further ones are dropped and counted."
        ),
    )
    payload_log: LogModes = Field(
        PayloadRules(),
        description=(
            "What records contain: all, request, response, metadata (neither) or off (no record); model=mode "
            "after it for single models, as in all,storyteller=metadata."
        ),
    )
    payload_sample: float = Field(
        1.0, ge=0, le=1, description="Fraction of requests that are recorded, selected by request id."
    )
    payload_redact: Redactions = Field(
        (),
        description=(
            'Redaction: a JSON list of rules, or a file with one: {"path": "$.parameters.user"}, {"pattern": '
            '"[0-9]{16}", "replace": "[card]"}, or both in one rule; see headrace/payload/redaction.py.'
        ),
    )
    payload_metadata: LoggedMetadata = Field(
        frozenset(), description="Comma list of request headers that records contain; headers with secrets are refused."
    )
    payload_tensor_bytes: ByteSize = Field(
        ByteSize(0),
        ge=0,
        le=16 << 20,
        description="Maximum size of a tensor whose contents are recorded.",
    )
    payload_tensor_digest: Digest = Field(
        Digest.OFF,
        description=(
            "Digest of the contents that each recorded tensor has: off, blake2b or sha256. A digest costs processor "
            "time, and keeps large tensors in memory until it is computed."
        ),
    )

    @property
    def payload_rules(self) -> PayloadRules:
        return replace(
            self.payload_log,
            sample=self.payload_sample,
            redactions=self.payload_redact,
            metadata=self.payload_metadata,
            tensor_bytes=self.payload_tensor_bytes,
            tensor_digest=self.payload_tensor_digest,
        )
