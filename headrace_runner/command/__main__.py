"""The command `headrace`: `headrace --help`."""

import argparse
import os
import shutil
import sys
from functools import partial
from pathlib import Path
from typing import Any

from headrace.clients import Policy
from headrace.errors import StartupError
from headrace_runner import settings as stack_settings
from headrace_runner.command import access, chat, doctor, help_texts, models, records, start
from headrace_runner.gateway import Gateway
from headrace_runner.replay import options as replay_options
from headrace_runner.replay.results import TROUBLE
from headrace_runner.terminal import Painter, has_colours, short


def main(arguments: list[str] | None = None) -> None:
    options = parse(arguments)
    try:
        options.run(options)
        sys.stdout.flush()
    except StartupError as error:
        sys.stderr.write(f"{error}\n")
        raise SystemExit(options.trouble) from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    except BrokenPipeError:
        # The reader of the pipe is gone; without this Python would report it again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(1) from None


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parses the arguments; settings may be anywhere, which argparse does not support for subcommands."""
    own = parser()
    options, others = own.parse_known_args(arguments)
    if others and (not hasattr(options, "settings") or any(other.startswith("-") for other in others)):
        own.error(f"unknown arguments: {' '.join(others)}")
    if others:
        options.settings = [*options.settings, *others]
    return options


def parser() -> argparse.ArgumentParser:
    """The command line; `run` of the parsed arguments is the chosen command."""
    top = argparse.ArgumentParser(
        prog="headrace",
        description="Starts a stack that serves language models, and talks to a running one.",
        epilog="`headrace COMMAND --help` has examples of each. Those that call a stack send the key of HEADRACE_KEY.",
    )
    commands = top.add_subparsers(metavar="COMMAND", required=True)

    def command(name: str, run: Any, summary: str, description: str, *, calls: bool = True) -> argparse.ArgumentParser:
        own = commands.add_parser(
            name, help=summary, description=description, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        own.set_defaults(run=run, trouble=1)
        if calls:
            text = "host:port of the gateway; without it that of GATEWAY_BIND and GATEWAY_PORT (127.0.0.1:8080)"
            own.add_argument("--gateway", default="", metavar="ADDRESS", help=text)
        return own

    up = command("up", partial(_run, "up"), "start the stack", help_texts.UP, calls=False)
    serve = command("serve", _serve, "start the stack with one model", help_texts.SERVE, calls=False)
    where = "a folder, a GGUF file, a hub id with or without @revision, or a URL; NAME=MODEL names it"
    serve.add_argument("model", metavar="MODEL", help=where)
    serve.add_argument("--name", default="", help="what clients call it; without it the last part of MODEL")
    down = command("down", partial(_run, "down"), "stop the stack", help_texts.DOWN, calls=False)
    roll = command("roll", partial(_run, "roll"), "replace the stack's services", help_texts.ROLL, calls=False)
    examined = command("doctor", _doctor, "check this machine", help_texts.DOCTOR, calls=False)
    for own in (up, serve, down, roll, examined):
        own.add_argument("settings", nargs="*", metavar="NAME=value", help="settings of this stack")
    for own in (up, serve):
        own.add_argument("-v", "--verbose", action="store_true", help="print every address and a call by gRPC")

    pull = command("pull", _pull, "fetch models now", help_texts.PULL, calls=False)
    pull.add_argument("locations", nargs="+", metavar="LOCATION", help="a hub id with or without @revision, or a URL")
    command("models", _models, "list the models in the caches", help_texts.MODELS, calls=False)

    talking = command("chat", _chat, "talk to a model", help_texts.CHAT)
    talking.add_argument("prompt", nargs="?", metavar="PROMPT", help="default: read from the terminal or the pipe")
    talking.add_argument("--model", default="", help="without it the first text model that is ready")
    talking.add_argument("--system", default="", metavar="TEXT", help="a system message, for models with a template")
    talking.add_argument("--max-tokens", type=int, metavar="N", help="maximum of tokens in an answer")
    talking.add_argument("--temperature", type=float, metavar="T", help="0 always takes the likeliest token")
    talking.add_argument("--seed", type=int, metavar="N", help="the same seed and prompt give the same answer")

    smoke = command("smoke", _smoke, "check every endpoint", help_texts.SMOKE)
    smoke.add_argument("model", nargs="?", default="", metavar="MODEL", help="without it every model that is ready")
    load = command("load", _load, "put load on the stack", help_texts.LOAD)
    modes = load.add_mutually_exclusive_group()
    modes.add_argument("--knee", dest="mode", action="store_const", const="knee", help="search for the knee")
    modes.add_argument("--check", dest="mode", action="store_const", const="check", help="hold the objective")
    load.add_argument("locust", nargs="*", metavar="-- OPTION", help="for Locust, such as --objective 'TTFT <= 1 s'")
    load.set_defaults(mode="")

    replay = command("replay", _replay, "run logged streams again and compare", replay_options.HELP)
    when = "90s, 15m, 24h, 7d ago, or a time in ISO 8601"
    since_text = f"{when}; default 1h, with --from all of the file"
    replay.add_argument("--since", type=records.since, metavar="TIME", help=since_text)
    replay_options.add_options(replay)
    replay.set_defaults(trouble=TROUBLE)

    key = command("key", _key, "make a client's key", help_texts.KEY, calls=False)
    key.add_argument("name", metavar="NAME", help="of the client")
    key.add_argument("--role", choices=("user", "admin"), help="without it user")
    key.add_argument("--models", type=lambda text: text.split(","), metavar="A,B", help="without it all models")
    for name in access.LIMITS:
        text = Policy.model_fields[name].description
        key.add_argument(f"--{name.replace('_', '-')}", metavar="N", help=text)
    key.add_argument("--file", type=Path, metavar="FILE", help="default: GATEWAY_KEYS, else config/keys.yaml")

    certs = command("certs", _certs, "make certificates for development", help_texts.CERTS, calls=False)
    certs.add_argument("names", nargs="*", metavar="NAME", help="host names and addresses of the gateway")
    certs.add_argument("--folder", type=Path, default=access.CERTIFICATES, help="for GATEWAY_TLS (default .run/certs)")
    certs.add_argument("--ask-clients", action="store_true", help="write ca.crt too: clients need a certificate")

    log = command("log", _log, "list the requests so far", help_texts.LOG)
    log.add_argument("id", nargs="?", metavar="ID", help="show all of this record")
    number = replay_options.up_to(records.MAX_RECORDS)
    log.add_argument("-n", "--number", type=number, default=20, metavar="N", help="records (default 20, maximum 1000)")
    log.add_argument("-f", "--follow", action="store_true", help="then print each new record as it is written")
    log.add_argument("--json", action="store_true", help="print all of each record, as a line of JSON")
    log.add_argument("--since", type=records.since, metavar="TIME", help=when)
    for name, text in (
        ("model", "of this model"),
        ("status", "with this gRPC status, such as OK or UNAVAILABLE"),
        ("request-id", "with this request id"),
        ("trace-id", "of this trace"),
        ("client", "of this client"),
    ):
        log.add_argument(f"--{name}", help=f"only records {text}")
    log.add_argument("--contains", dest="text_contains", metavar="TEXT", help="only records whose text contains it")

    used = command("usage", _usage, "sum up tokens and requests", help_texts.USAGE)
    used.add_argument("--since", type=records.since, metavar="TIME", help=when)
    used.add_argument("--until", type=records.since, metavar="TIME", help="before this time; as --since")
    used.add_argument("--client", help="only this client's")
    used.add_argument("--model", help="only this model's")
    groups = "comma list of client, model, day; default client,model; all for one line"
    used.add_argument("--group", metavar="NAMES", help=groups)
    used.add_argument("--json", action="store_true", help="print each group as a line of JSON")

    trace = command("trace", _trace, "show one trace", help_texts.TRACE)
    trace.add_argument("id", metavar="ID", help="of a trace, a request or a record, or a traceparent")
    return top


def _run(action: str, options: argparse.Namespace) -> None:
    start.run_runner(action, options.settings, *(["--verbose"] if action == "up" and options.verbose else []))


def _serve(options: argparse.Namespace) -> None:
    options.settings.append(f"MODELS={start.models_setting(options.model, options.name)}")
    _run("up", options)


def _doctor(options: argparse.Namespace) -> None:
    start.take(options.settings)
    raise SystemExit(doctor.examine(_painter()))


def _pull(options: argparse.Namespace) -> None:
    for location in options.locations:
        print(models.pull(location), flush=True)


def _models(_: argparse.Namespace) -> None:
    print(models.as_table(models.cached_models(), models.memory_bandwidth(), _painter()))


def _chat(options: argparse.Namespace) -> None:
    gateway = _gateway(options)
    model = chat.choose_model(gateway, options.model)
    conversation = chat.Conversation(
        model,
        gateway.has_chat_template(model),
        options.system,
        _given(options, "max_tokens", "temperature", "seed"),
    )
    paint = Painter(has_colours(sys.stderr, os.environ))
    if options.prompt is None and sys.stdin.isatty():
        chat.talk(gateway, conversation, paint)
    else:
        prompt = sys.stdin.read().rstrip("\n") if options.prompt is None else options.prompt
        chat.answer(gateway, conversation, prompt, paint)


def _smoke(options: argparse.Namespace) -> None:
    gateway = _gateway(options)
    gateway.check()
    try:
        from headrace_runner.smoke.checks import smoke  # Needs packages that the command does without.
    except ImportError as error:
        raise StartupError(f"smoke needs the package {error.name}: `pip install headrace` has it") from None
    if smoke(gateway.address, options.model):
        raise SystemExit(1)


def _load(options: argparse.Namespace) -> None:
    gateway = _gateway(options)
    gateway.check()
    start.run_load(gateway.address, stack_settings.load(), options.mode, options.locust)


def _replay(options: argparse.Namespace) -> None:
    if options.since is None and options.file is None:
        options.since = records.since("1h")
    gateway = options.gateway or stack_settings.load().gateway
    code = replay_options.replay(options, gateway)
    sys.stdout.flush()
    raise SystemExit(code)


def _key(options: argparse.Namespace) -> None:
    file = options.file or stack_settings.load().key_file or access.KEY_FILE
    key = access.add_key(file, options.name, _given(options, *Policy.model_fields))
    print(f"{key}\nentry of {options.name} in {short(file)}; GATEWAY_KEYS={short(file)} makes the gateway ask for keys")


def _certs(options: argparse.Namespace) -> None:
    folder = options.folder.absolute()
    access.make_certificates(folder, options.names, ask_clients=options.ask_clients)
    print(access.next_steps(folder, stack_settings.load(), ask_clients=options.ask_clients))


def _log(options: argparse.Namespace) -> None:
    gateway, paint = _gateway(options), _painter()
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    if options.id:
        record = records.one(gateway, options.id)
        print(records.as_json(record) if options.json else records.as_text(record, paint))
        return
    filters = _given(options, "model", "status", "request_id", "trace_id", "client", "text_contains", "since")
    read = records.follow if options.follow else records.latest
    for record in read(gateway, options.number, filters):
        print(records.as_json(record) if options.json else records.as_line(record, paint, width), flush=options.follow)


def _usage(options: argparse.Namespace) -> None:
    query = _given(options, "since", "until", "client", "model", "group")
    if options.group == "all":
        query["group"] = ""
    response = records.usage(_gateway(options), query)
    if options.json:
        for group in response.groups:
            print(records.as_json(group))
    else:
        print(records.usage_table(response, _painter()))


def _trace(options: argparse.Namespace) -> None:
    gateway = _gateway(options)
    print(records.as_trace(records.of_trace(gateway, options.id), records.trace_page(gateway), _painter()))


def _given(options: argparse.Namespace, *names: str) -> dict[str, Any]:
    """Those of the options that the command line has."""
    return {name: value for name in names if (value := getattr(options, name)) is not None}


def _gateway(options: argparse.Namespace) -> Gateway:
    return Gateway(options.gateway or stack_settings.load().gateway)


def _painter() -> Painter:
    return Painter(has_colours(sys.stdout, os.environ))


if __name__ == "__main__":
    main()
