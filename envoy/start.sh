#!/usr/bin/env bash
# Runs Envoy in its container, with the arguments given and the configuration beside this file, into which
# PREDICTOR_ENDPOINTS, GATEWAY_ALLOWED_ORIGINS, GATEWAY_TLS, GATEWAY_JWKS and GATEWAY_RATE_LIMIT_SERVICE are written as
# headrace_runner/envoy_config.py does it; refuses the settings that headrace_runner/ refuses. Envoy itself cuts every call at SIGTERM; here it takes no new ones, and those in flight have
# DRAIN_S seconds first. At SIGHUP another Envoy, which reads all files anew, takes over its sockets, and the one before
# goes on with the calls that it has, for RELOAD_PATIENCE_S. Bash alone: the image has no curl.
set -euo pipefail
# Where Envoy's scripts find those that they share.
LUA_PATH="$(dirname "${BASH_SOURCE[0]}")/?.lua"
export LUA_PATH

# Whether the settings of who may call are as headrace_runner/settings.py has them; closes management beyond loopback.
check_callers() {
  local host='[A-Za-z0-9.-]+'
  if [[ ${GATEWAY_BIND:-127.0.0.1} != 127.* ]]; then export PUBLIC_MANAGEMENT=false; fi
  if ! [[ ${GATEWAY_HOSTS:-} =~ ^(\*|$host(,$host)*)?$ ]]; then
    echo "GATEWAY_HOSTS=$GATEWAY_HOSTS: must be * or a comma list of host names such as models.example.com" >&2
    return 78
  fi
  if [ -z "${GATEWAY_KEYS:-}" ]; then export KEY_DIGESTS=; fi
  if [[ ${GATEWAY_BIND:-127.0.0.1} != 127.* && -z ${GATEWAY_KEYS:-}${GATEWAY_JWKS:-} && ${GATEWAY_INSECURE:-false} != true ]]; then
    echo "GATEWAY_BIND=$GATEWAY_BIND: everyone who reaches this address could use the models: set GATEWAY_KEYS or GATEWAY_JWKS;" \
      "GATEWAY_INSECURE=true allows it, for example behind a proxy that checks its callers" >&2
    return 78
  fi
}

# Whether the files of GATEWAY_TLS and GATEWAY_JWKS are there, as headrace_runner/envoy_config.py has it.
check_access() {
  local path='^[^"\\[:cntrl:]]*$' uri="^[A-Za-z0-9._~:/?#@!\$&'()*+,;=%-]+$" name
  for name in GATEWAY_TLS GATEWAY_JWKS; do
    if ! [[ ${!name:-} =~ $path ]]; then
      echo "$name=${!name}: must be a path without quotation marks and backslashes" >&2
      return 78
    fi
  done
  if [ -n "${GATEWAY_TLS:-}" ] && ! [[ -r $GATEWAY_TLS/tls.crt && -r $GATEWAY_TLS/tls.key &&
    (! -e $GATEWAY_TLS/ca.crt || -r $GATEWAY_TLS/ca.crt) ]]; then
    echo "GATEWAY_TLS=$GATEWAY_TLS: must be a folder with a tls.crt and a tls.key that user $(id -u) can read;" \
      "\`make certs\` makes them for development, and containers need deploy/compose/tls.yaml" >&2
    return 78
  fi
  if [ -z "${GATEWAY_JWKS:-}" ]; then return 0; fi
  if ! [[ -r $GATEWAY_JWKS && $(<"$GATEWAY_JWKS") == *'"keys"'* ]]; then
    echo "GATEWAY_JWKS=$GATEWAY_JWKS: must be a file with a JSON Web Key Set, {\"keys\": […]}" >&2
    return 78
  fi
  for name in GATEWAY_JWT_ISSUER GATEWAY_JWT_AUDIENCE; do
    if ! [[ ${!name:-} =~ $uri ]]; then
      echo "$name=${!name:-}: GATEWAY_JWKS needs it, a name or a URI as in the tokens" >&2
      return 78
    fi
  done
}

# Whether the settings of the rate limit service are as headrace_runner/settings.py has them.
check_rate_limits() {
  local endpoint='^([A-Za-z0-9.-]+:[1-9][0-9]{0,4})?$' service=${GATEWAY_RATE_LIMIT_SERVICE:-}
  if ! [[ $service =~ $endpoint ]] || [[ ${service##*:} -gt 65535 ]]; then
    echo "GATEWAY_RATE_LIMIT_SERVICE=$service: must be host:port" >&2
    return 78
  fi
  if ! [[ ${GATEWAY_RATE_LIMIT_REQUIRED:-false} =~ ^(true|false)$ ]]; then
    echo "GATEWAY_RATE_LIMIT_REQUIRED=$GATEWAY_RATE_LIMIT_REQUIRED: must be true or false" >&2
    return 78
  fi
}

# An item of PREDICTOR_ENDPOINTS that is a service: the transformer lists its addresses, for Envoy resolves no SRV records.
service='^_[A-Za-z0-9-]+\._tcp\.[A-Za-z0-9_][A-Za-z0-9._-]*$'

# Whether PREDICTOR_ENDPOINTS is as headrace_runner/settings.py has it.
check_predictors() {
  local endpoint='([A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\]):([1-9][0-9]{0,4})' items item
  IFS=', ' read -ra items <<<"${PREDICTOR_ENDPOINTS:-}"
  for item in "${items[@]}"; do
    if ! [[ $item =~ $service || $item =~ ^$endpoint$ && ${BASH_REMATCH[2]} -le 65535 ]]; then
      echo "PREDICTOR_ENDPOINTS=$PREDICTOR_ENDPOINTS: '$item' is not host:port" >&2
      return 78
    fi
  done
}

# The configuration $1 with the predictors of PREDICTOR_ENDPOINTS beside those of the container's name.
with_predictors() {
  local text=$1 items item host lines= has_service=
  IFS=', ' read -ra items <<<"${PREDICTOR_ENDPOINTS:-}"
  for item in "${items[@]}"; do
    if [[ $item =~ $service ]]; then
      has_service=true
      continue
    fi
    host=${item%:*} host=${host#[} host=${host%]}
    lines+=$'\n'"        - endpoint: {address: {socket_address: {address: \"$host\", port_value: ${item##*:}}}}"
  done
  if [ -n "$lines$has_service" ]; then
    text=${text/'1s  # PREDICTOR_ENDPOINTS'/3.5s}
    text=${text/'}}}  # PREDICTOR_ENDPOINTS'/"}}}$lines"}
  fi
  if [ -n "$has_service" ]; then
    text=${text/'type: STRICT_DNS  # SRV'/'type: EDS'} text=${text//'#SRV '/}
    text=${text//'<PREDICTORS>'/"$LISTED_PREDICTORS"}
  fi
  printf '%s\n' "$text"
}

# Waits for the transformer's file of predictors, if the configuration names it.
await_predictors() {
  grep -q 'type: EDS' "$config" || return 0
  for _ in {1..600}; do
    if [ -e "$LISTED_PREDICTORS" ]; then return 0; fi
    sleep 0.1
  done
  echo "the transformer has not written $LISTED_PREDICTORS (TRANSFORMER_GATEWAY_ENDPOINTS) within 60 s" >&2
  return 69
}

# A file beside this one with the values of settings, whose letters mean nothing in YAML, and the lines behind their marks.
filled() {
  local text name jwks_folder=
  text=$(<"$(dirname "${BASH_SOURCE[0]}")/$1")
  if [ -n "${GATEWAY_TLS:-}" ]; then
    text=${text//'#TLS '/}
    if [ -e "$GATEWAY_TLS/ca.crt" ]; then text=${text//'#CLIENTS '/}; fi
    text=${text//'<GATEWAY_TLS>'/"$GATEWAY_TLS"}
  fi
  if [ -n "${GATEWAY_JWKS:-}" ]; then
    text=${text//'#JWT '/}
    jwks_folder=$(dirname "$GATEWAY_JWKS")
    text=${text//'<GATEWAY_JWKS_FOLDER>'/"$jwks_folder"}
    for name in GATEWAY_JWKS GATEWAY_JWT_ISSUER GATEWAY_JWT_AUDIENCE; do text=${text//"<$name>"/"${!name}"}; done
  fi
  if [ -n "${GATEWAY_RATE_LIMIT_SERVICE:-}" ]; then
    text=${text//'#LIMITS '/}
    text=${text//'<GATEWAY_RATE_LIMIT_HOST>'/"${GATEWAY_RATE_LIMIT_SERVICE%:*}"}
    text=${text//'<GATEWAY_RATE_LIMIT_PORT>'/"${GATEWAY_RATE_LIMIT_SERVICE##*:}"}
    text=${text//'<GATEWAY_RATE_LIMIT_REQUIRED>'/"${GATEWAY_RATE_LIMIT_REQUIRED:-false}"}
  fi
  printf '%s\n' "${text//'<STATE>'/"$state"}"
}

# The configuration with the origins of GATEWAY_ALLOWED_ORIGINS; writes the secrets that it names as well.
configuration() {
  local origins=${GATEWAY_ALLOWED_ORIGINS:-} origin='https?://[][A-Za-z0-9.:-]+' matchers text
  if ! [[ $origins =~ ^(\*|$origin(,$origin)*)?$ ]]; then
    echo "GATEWAY_ALLOWED_ORIGINS=$origins: must be * or a comma list of origins such as https://host:port" >&2
    return 78
  fi
  matchers=${origins:+"{exact: \"${origins//,/'"}, {exact: "'}\"}"}
  check_access || return
  check_rate_limits || return
  check_predictors || return
  if [ -n "${GATEWAY_TLS:-}" ]; then
    filled certificate.yaml >"$state/certificate.yaml" || return
    filled client_authority.yaml >"$state/client_authority.yaml" || return
  fi
  text=$(filled envoy.yaml) || return
  text=${text/'_connections: 10000'/"_connections: $connections"}
  with_predictors "${text/'[]  # GATEWAY_ALLOWED_ORIGINS'/"[$matchers]"}"
}

# What the admin page answers: ask METHOD PATH.
ask() {
  exec 3<>/dev/tcp/127.0.0.1/${ADMIN_PORT:-9901}
  printf '%s %s HTTP/1.1\r\nhost: admin\r\nconnection: close\r\n\r\n' "$1" "$2" >&3
  cat <&3
  exec 3>&-
}

# Of both generations: Envoy adds what the one before counts.
open_calls() {
  ask GET '/stats?filter=^http.ingress.downstream_rq_active$' | sed -n 's/.*downstream_rq_active: \([0-9]*\).*/\1/p'
}

drain() {
  trap '' TERM INT
  # Connections that are open are told to go with the next answer, and no new ones are taken.
  ask POST '/drain_listeners?graceful' >/dev/null || true
  ask POST /drain_listeners >/dev/null || true
  local give_up_at=$((SECONDS + DRAIN_S))
  while ((SECONDS < give_up_at)) && [ "$(open_calls)" != 0 ]; do sleep 0.1; done
  local status=0
  kill -TERM "$envoy" 2>/dev/null || true
  wait "$envoy" || status=$?
  # Only now: Envoy asks the one before it for its counters, and aborts when that one does not answer.
  if [ -n "$before" ]; then kill -TERM "$before" 2>/dev/null || true; fi
  wait
  exit "$status"
}

# Envoy knows two generations at a time; a third would end the first.
has_calls_of_before() {
  [ -n "$before" ] && kill -0 "$before" 2>/dev/null &&
    [ "$(ask GET '/stats?filter=^server.parent_connections$' | sed -n 's/.*parent_connections: \([0-9]*\).*/\1/p')" != 0 ]
}

is_live() {
  local info
  info=$(ask GET /server_info 2>/dev/null) || return 1
  [[ $info == *'"state": "LIVE"'* && $info == *'"restart_epoch": '"$1,"* ]]
}

launch() {
  envoy --config-path "$config" "${arguments[@]}" --restart-epoch "$epoch" --concurrency "$workers" \
    --drain-strategy immediate --drain-time-s "$DRAIN_S" --parent-shutdown-time-s "${RELOAD_PATIENCE_S:-600}" &
}

reload() {
  local new=${config%.yaml}.new.yaml running=$envoy
  if has_calls_of_before; then
    echo "not reloaded: connections of before the last reload are still open" >&2
    return 0
  fi
  if ! configuration >"$new" || ! envoy --mode validate --config-path "$new" "${arguments[@]}"; then
    echo "not reloaded: the configuration is refused" >&2
    return 0
  fi
  mv "$new" "$config"
  epoch=$((epoch + 1))
  launch
  envoy=$!
  until is_live "$epoch"; do
    if ! kill -0 "$envoy" 2>/dev/null; then
      echo "not reloaded: the new Envoy did not start" >&2
      envoy=$running epoch=$((epoch - 1))
      return 0
    fi
    sleep 0.1
  done
  before=$running
  echo "reloaded: a new Envoy takes the calls, the previous one finishes its own" >&2
}

# Each caller's connection takes a descriptor, and so do Envoy's own: as many as are allowed. Where these are few, callers
# are refused rather than the connections to services, as headrace_runner/envoy_config.py has it.
ulimit -Sn "$(ulimit -Hn)"
descriptors=$(ulimit -n)
if [ "$descriptors" = unlimited ]; then descriptors=65536; fi
connections=$((descriptors < 256 ? 128 : descriptors < 10128 ? descriptors - 128 : 10000))
if ((descriptors < 1024)); then
  echo "only $descriptors open files and connections are allowed: with more callers, some are not accepted; set \`ulimits:" \
    "{nofile: 65536}\` of the container" >&2
fi
# A worker holds its own connections to every service and takes a core when busy: on a small machine,
# shared with the model, one is faster than two.
workers=$(($(nproc) / 4))
workers=$((workers > 0 ? workers : 1))
# Each worker bounds the bodies of REST requests by itself, and takes one of 60 MiB at least (rest_errors.lua).
REST_BODIES_MIB=$((512 / workers))
export REST_BODIES_MIB=$((REST_BODIES_MIB > 80 ? REST_BODIES_MIB : 80))
# And the calls whose first message has yet to come (first_message.lua).
export HELD_CALLS=$((4096 / workers))
# A predictor elsewhere cannot send its records to the logger, so the transformer makes those of all calls.
if [ -n "${PREDICTOR_ENDPOINTS:-}" ]; then export DIRECT_MODELS=; fi
state=${TMPDIR:-/tmp}
config=$state/envoy.yaml
check_callers
configuration >"$config"
await_predictors
arguments=("$@") epoch=0 before=
launch
envoy=$!
trap drain TERM INT
trap reload HUP
# A signal ends `wait`, not Envoy.
while true; do
  status=0
  wait "$envoy" || status=$?
  kill -0 "$envoy" 2>/dev/null || break
done
exit "$status"
