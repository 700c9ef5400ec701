#!/usr/bin/env bash
# Runs Envoy in its container, with the arguments given and the configuration beside this file, into which
# GATEWAY_ALLOWED_ORIGINS is written as runner/envoy_config.py does it. Envoy itself cuts every call at SIGTERM; here it
# takes no new ones, and those in flight have DRAIN_S seconds first. Bash alone: the image has no curl.
set -euo pipefail

# The configuration with the origins of GATEWAY_ALLOWED_ORIGINS, whose letters mean nothing in YAML.
configuration() {
  local origins=${GATEWAY_ALLOWED_ORIGINS:-} origin='https?://[][A-Za-z0-9.:-]+' matchers text
  if ! [[ $origins =~ ^(\*|$origin(,$origin)*)?$ ]]; then
    echo "GATEWAY_ALLOWED_ORIGINS=$origins: is neither * nor a comma list of origins such as https://host:port" >&2
    return 78
  fi
  matchers=${origins:+"{exact: \"${origins//,/'"}, {exact: "'}\"}"}
  text=$(<"$(dirname "${BASH_SOURCE[0]}")/envoy.yaml")
  printf '%s\n' "${text/'[]  # GATEWAY_ALLOWED_ORIGINS'/"[$matchers]"}"
}

# What the admin page answers: ask METHOD PATH.
ask() {
  exec 3<>/dev/tcp/127.0.0.1/9901
  printf '%s %s HTTP/1.1\r\nhost: admin\r\nconnection: close\r\n\r\n' "$1" "$2" >&3
  cat <&3
  exec 3>&-
}

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
  kill -TERM "$envoy"
}

# A worker holds its own connections to every service and takes a core when busy: on a small machine,
# shared with the model, one is faster than two.
workers=$(($(nproc) / 4))
workers=$((workers > 0 ? workers : 1))
# Each worker bounds the bodies of REST requests by itself, and takes one of 60 MiB at least (rest_errors.lua).
REST_BODIES_MIB=$((512 / workers))
export REST_BODIES_MIB=$((REST_BODIES_MIB > 80 ? REST_BODIES_MIB : 80))
# Hot restart is for two Envoys on one machine; a container has one.
config=${TMPDIR:-/tmp}/envoy.yaml
configuration >"$config"
envoy --config-path "$config" "$@" --disable-hot-restart --concurrency "$workers" --drain-strategy immediate \
  --drain-time-s "$DRAIN_S" &
envoy=$!
trap drain TERM INT
# A signal ends `wait`, not Envoy.
while true; do
  status=0
  wait "$envoy" || status=$?
  kill -0 "$envoy" 2>/dev/null || break
done
exit "$status"
