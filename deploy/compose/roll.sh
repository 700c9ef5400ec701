#!/usr/bin/env bash
# Replaces the containers of a running stack, one after the other, by ones of the present settings and images, at the
# cost of no call:
#
#     docker compose build && deploy/compose/roll.sh
#
# Arguments go to `docker compose` as they are (-f compose.yaml -f deploy/compose/gpu.yaml). ROLL_PATIENCE_S (600) is how long
# the calls of a container that is being replaced may take; a GPU has to have room for one predictor more.
#
# A successor starts beside the containers of its service and has to become healthy. Then an old one gets SIGUSR1: it
# takes no new call, sends its connections away, and ends with its last call. The gateway reads envoy/ anew in the
# container that it has, since only one can have its port.
set -euo pipefail

patience=${ROLL_PATIENCE_S:-600}
compose=(docker compose "$@")

containers() { "${compose[@]}" ps --quiet "$1"; }

# What the gateway's admin page answers.
gateway() {
  "${compose[@]}" exec -T envoy bash -c "exec 3<>/dev/tcp/127.0.0.1/9901
    printf 'GET $1 HTTP/1.1\\r\\nhost: admin\\r\\nconnection: close\\r\\n\\r\\n' >&3; cat <&3" 2>/dev/null | tr -d '\r'
}

# How many hosts of a service it sends calls to. A transformer is in two clusters, one for each of its ports, and counts
# once it is healthy in both.
known_to_gateway() {
  gateway /clusters | awk -F:: -v service="$1" '
    $1 == service || $1 == service "_http" { healthy[$1] += $3 == "health_flags" && $4 == "healthy" }
    END {
      least = healthy[service] + 0
      for (cluster in healthy) if (healthy[cluster] < least) least = healthy[cluster]
      print least
    }'
}

generation() { gateway /server_info | sed -n 's/.*"restart_epoch": \([0-9]*\).*/\1/p' || true; }

reload_gateway() {
  local before give_up_at=$((SECONDS + 60)) now
  before=$(generation)
  echo "envoy: reloading"
  "${compose[@]}" kill --signal HUP envoy
  until now=$(generation) && [ "${now:-0}" -gt "${before:-0}" ]; do
    if ((SECONDS >= give_up_at)); then
      echo "envoy: not reloaded; \`docker compose logs envoy\` has the reason" >&2
      return 1
    fi
    sleep 0.5
  done
}

# Starts a container of a service beside the $2 others; it gets calls when this returns.
add() {
  local service=$1 count=$2 give_up_at=$((SECONDS + 60))
  "${compose[@]}" up --detach --no-build --no-deps --no-recreate --wait --scale "$service=$((count + 1))" "$service" &&
    while [ "$(known_to_gateway "$service")" -le "$count" ]; do
      ((SECONDS < give_up_at)) || return 1
      sleep 0.5
    done
}

# Ends a container with its last call.
retire() {
  # Nothing may start it again.
  docker update --restart=no "$1" >/dev/null
  docker kill --signal=USR1 "$1" >/dev/null
  if ! timeout "$patience" docker wait "$1" >/dev/null; then
    echo "calls of ${1:0:12} have not ended within $patience s" >&2
    docker stop "$1" >/dev/null
  fi
  docker rm --volumes "$1" >/dev/null
}

replace() {
  local service=$1 old count container
  old=$(containers "$service")
  count=$(wc -w <<<"$old")
  if [ "$count" = 0 ]; then
    echo "$service is not running" >&2
    return 1
  fi
  for container in $old; do
    echo "$service: replacing ${container:0:12}"
    local before
    before=$(containers "$service")
    if ! add "$service" "$count"; then
      containers "$service" | grep -vxF "$before" | xargs -r docker rm --force --volumes >/dev/null
      echo "$service: the successor gets no calls and was removed; the containers before it go on" >&2
      return 1
    fi
    retire "$container"
  done
}

for service in predictor transformer logger; do replace "$service"; done
reload_gateway
echo "every predictor, transformer and logger has been replaced, and the gateway reloaded"
