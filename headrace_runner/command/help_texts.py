"""The descriptions of the commands, for `headrace COMMAND --help`."""

UP = """Starts the whole stack as local processes, as `make up` does, and stops it at Ctrl-C.

  headrace up
  headrace up PREDICTORS=2 DEVICE=cpu
  headrace up 'MODELS=a=./folder,b=organisation/name'

docs/settings.md lists the settings; lines NAME=value of a file .env are read too, in the checkout or, where the
package is installed, in the current folder."""
SERVE = """Starts the whole stack with one model, and stops it at Ctrl-C.

  headrace serve ./my-model                  a folder that save_pretrained wrote, or one with a model.py
  headrace serve chat=./model-Q4_K_M.gguf    a GGUF file, which clients call chat
  headrace serve Qwen/Qwen3-0.6B             a model of the hub, downloaded once
  headrace serve org/name@revision --name chat DEVICE=cuda"""
DOWN = """Stops the stack of this checkout or, if the package is installed, of the current folder.

  headrace down
  headrace down PORT_OFFSET=1000              the stack that was started with this setting"""
ROLL = """Replaces the services of the running stack, without dropping a call: with the settings that are given and
those of .env, and with the code that is installed now.

  headrace roll PREDICTOR_MAX_RUNNING=8"""
DOCTOR = """Checks what a start needs: Python and its packages, settings and files that they name, ports, memory, disk,
the processor, Docker. A line for each, with what to do where something is wrong; exit code 1 if a start would fail.

  headrace doctor
  headrace doctor MODELS=chat=./folder PORT_OFFSET=1000"""
PULL = """Fetches models into this machine's caches and prints their folders. A download that was cut continues where it
stopped.

  headrace pull Qwen/Qwen3-0.6B              of the hub
  headrace pull s3://bucket/chat oci://registry.example/models/chat:v1

docs/models.md names the credentials."""
MODELS = """Lists the models in the caches: their size on the disk, the formats of their weights, the memory that they
take without caches of prompts, and the most tokens a second that one stream can have on this machine's CPU: the
measured bandwidth of its memory, by the bytes of the weights."""
CHAT = """Talks to a text model of a running stack; the answer is printed as it comes.

  headrace chat                              a conversation on the terminal
  headrace chat "Tell me a story."           one answer
  echo "Once upon a time" | headrace chat    one answer to what is piped in

A model without a chat template continues each line."""
SMOKE = """Calls every endpoint that a model should answer, and those that it must refuse, on a running stack: a table
of pass and FAIL, and exit code 1 where one fails. As `make smoke`."""
LOAD = """Puts load on a running stack with Locust. As `make load`, `make knee` and `make load-check`.

  headrace load                                         Locust's page; Ctrl-C ends it
  headrace load --knee -- StreamUser -u 4               the most users at which the objective is met, without the page
  headrace load --check -- -u 8 -t 1m StreamUser        exit code 1 where the objective is not met
  headrace load -- --processes 4                        behind --, options and users of Locust"""
KEY = """Makes a key for a client, adds the key's digest to the key file, and prints the key, which is not stored.
A running gateway that has the file as GATEWAY_KEYS knows the key within two seconds.

  headrace key alice
  headrace key operator --role admin         may also load models, change settings and read every record
  headrace key bob --models storyteller --requests-per-minute 60 --tokens-per-month 1000000

A second key of a client gets the limits of the first; docs/security.md explains them."""
CERTS = """Makes an authority, and by it certificates of the gateway and of a client, for development. As `make certs`.

  headrace certs                             for localhost, 127.0.0.1 and ::1
  headrace certs models.example.com          for this name too; list it in GATEWAY_HOSTS
  headrace certs --ask-clients               the gateway accepts only clients that show a certificate

A gateway with this folder uses the new certificate at once; it decides at its start
whether clients need a certificate."""
LOG = """Lists the newest records of the payload log, the newest last: time, model, status, prompt and answer tokens,
milliseconds to the first token and in all, request id, prompt and answer.

  headrace log -n 50 --model storyteller --since 1h
  headrace log --status UNAVAILABLE
  headrace log --follow
  headrace log --json | jq .text
  headrace log ID                            all of one record, by its own or its request's id"""
USAGE = """Shows the usage: numbers of requests and failures, their tokens, and the seconds that engines worked.

  headrace usage                             for each client and model, since the log began
  headrace usage --since 30d --group day
  headrace usage --since 2026-05-01T00:00Z --client ann --group model
  headrace usage --json | jq .completion_tokens

Times are rounded to whole hours, outwards; days are those of UTC. With a user's key it is the usage of that client."""
TRACE = """Shows the calls of one trace with each hop's status and times, and the link to its spans.

ID is the id of a trace, of a request (the answer's x-request-id) or of a record, or a traceparent. The spans are at a
collector such as Jaeger: `docker compose up` has one; with `make up`, set OTEL_EXPORTER_OTLP_TRACES_ENDPOINT, and
GATEWAY_TRACE_PAGE for the link."""
