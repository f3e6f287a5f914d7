#!/usr/bin/env bash
# The containers of docs/deploy.md, built and run for real, with faults: on Debian 12 or 13, as root, with apt and pip's index in reach.
#   tests/load/containers.sh [CHECKOUT]   status 0: all held; 1: something failed; 77: cannot be done here
# It needs no image registry: the base image is made by debootstrap. Settings: TORCH_INDEX, the Dockerfile's build argument; WHEELS, a folder
# of wheels for pip in the image, where an index is out of reach; MIRROR, Debian's; WORK, a folder for everything; KEEP=1 leaves it.
# About 5 minutes on two cores, 6 GB of disk in $WORK. It ends what it started, and removes what it made, but for apt's packages.
set -euo pipefail
checkout=$(realpath "${1:-$(dirname "$0")/../..}")
WORK=${WORK:-$(mktemp -d)}
mkdir -p "$WORK"
skip() { echo "skipped: $*"; exit 77; }
say() { echo "[$(date +%T)] $*"; }
[ "$(id -u)" = 0 ] || skip "not root"
command -v apt-get > /dev/null || skip "no apt"
mirror=${MIRROR:-http://deb.debian.org/debian}
grep -q overlay /proc/filesystems || skip "no overlayfs"

# ---- tools: an engine, and compose 2 (Debian 12 has only 1.29, which refuses the override: taken from Debian 13's package)
need() { command -v "$1" > /dev/null || DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${@:2}" > /dev/null; }
(need dockerd docker.io iptables && need debootstrap debootstrap) || skip "apt has no docker.io or no debootstrap"
export DOCKER_CONFIG=$WORK/config DOCKER_HOST=unix://$WORK/docker.sock
mkdir -p "$DOCKER_CONFIG/cli-plugins"
if ! docker compose version > /dev/null 2>&1; then
  mkdir -p "$WORK"/apt/{lists/partial,cache/archives/partial} && cd "$WORK/apt"
  echo "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] $mirror trixie main" > list
  printf 'Dir::Etc::sourcelist "%s/list"; Dir::Etc::sourceparts "-"; Dir::State::lists "%s/lists"; Dir::Cache "%s/cache";\n' "$PWD" "$PWD" "$PWD" > conf
  (export APT_CONFIG=$PWD/conf; apt-get update -qq && apt-get download docker-compose docker-buildx) > /dev/null 2>&1 || skip "no compose 2"
  for deb in *.deb; do dpkg -x "$deb" unpacked; done
  ln -s "$PWD"/unpacked/usr/libexec/docker/cli-plugins/* "$DOCKER_CONFIG/cli-plugins/"
fi

# ---- an engine of its own
printf '{"data-root":"%s/data","exec-root":"%s/exec","pidfile":"%s/pid","hosts":["%s"],"bridge":"none"}' "$WORK" "$WORK" "$WORK" "$DOCKER_HOST" > "$WORK/daemon.json"
forwarding=$(cat /proc/sys/net/ipv4/ip_forward)
iptables-save > "$WORK/rules"
setsid dockerd --config-file "$WORK/daemon.json" > "$WORK/dockerd.log" 2>&1 &
engine=$!
folder=""
dc() { docker compose --project-directory "$folder" -f docker-compose.yml -f "$folder/compose.override.yaml" "$@"; }
finish() {
  status=$?
  [ -z "$folder" ] || (cd "$WORK/checkout" && [ $status = 0 ] || docker ps -a || true; cd "$WORK/checkout" && dc down --timeout 5 > /dev/null 2>&1) || true
  kill "$engine" 2> /dev/null && wait "$engine" 2> /dev/null || true
  echo "$forwarding" > /proc/sys/net/ipv4/ip_forward
  iptables-restore < "$WORK/rules" # the engine leaves its chains behind, and drops what is forwarded
  [ -n "${KEEP:-}" ] || rm -rf "$WORK"
  exit $status
}
trap finish EXIT
for _ in $(seq 60); do docker info > /dev/null 2>&1 && break; sleep 0.5; done
docker info > /dev/null 2>&1 || skip "no engine starts here: $(tail -1 "$WORK/dockerd.log")"

# ---- the base image, by the name in the Dockerfile
base=$(sed -n 's/^FROM //p' "$checkout/Dockerfile" | head -1)
say "debootstrap $base"
debootstrap --variant=minbase --include=ca-certificates,netbase,tzdata,python3.11,python3.11-venv,python3-distutils bookworm "$WORK/base" $mirror > "$WORK/debootstrap.log" 2>&1 || { tail "$WORK/debootstrap.log"; exit 1; }
chroot "$WORK/base" python3.11 -m venv /usr/local # python and pip on PATH, where the true image has them
[ ! -e /etc/ssl/certs/ca-certificates.crt ] || cp /etc/ssl/certs/ca-certificates.crt "$WORK/base/etc/ssl/certs/"
[ -z "${WHEELS:-}" ] || cp -r "$WHEELS" "$WORK/base/wheels"
tar -C "$WORK/base" --exclude=./var/cache/apt/archives/*.deb -c . |
  docker import -c 'ENV PATH=/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin' -c 'ENV LANG=C.UTF-8' \
    -c 'ENV PIP_CERT=/etc/ssl/certs/ca-certificates.crt PIP_FIND_LINKS=/wheels' - "$base" > /dev/null
rm -rf "$WORK/base"

# ---- build, init, up, wait: the commands of docs/deploy.md
git clone -q "$checkout" "$WORK/checkout" && cd "$WORK/checkout"
say "docker build"
docker build --network host ${TORCH_INDEX:+--build-arg TORCH_INDEX="$TORCH_INDEX"} -t fedgauge:0.1.0 . > "$WORK/build.log" 2>&1 || { tail -20 "$WORK/build.log"; exit 1; }
docker images --format '{{.Repository}}:{{.Tag}} {{.Size}}'
fg() { docker run --rm --network none --read-only --tmpfs /tmp -v "$PWD:/here" -w /here --user "$(stat -c %u:%g "$folder" 2> /dev/null || echo 0:0)" fedgauge:0.1.0 fedgauge "$@"; }
docker run --rm --network none -v "$PWD:/here" -w /here --user "$(id -u):$(id -g)" fedgauge:0.1.0 fedgauge deploy init federation --clients 3 --grading scores
folder=federation
run=federation/runs/federation
say "up"
dc up --detach > "$WORK/up.log" 2>&1 || { tail -20 "$WORK/up.log"; exit 1; }

# ---- faults, each once round 1 is recorded: what heals by itself (the table of docs/deploy.md)
name() { docker ps --format '{{.Names}}' | grep -- "-$1-1\$"; }
fall() { # from outside, as `docker kill` would leave it down
  kill -9 "$(docker inspect -f '{{.State.Pid}}' "$(name "$1")")"
  say "killed $1"
}
back() { # it runs again
  for _ in $(seq 90); do [ "$(docker inspect -f '{{.State.Running}}' "$1")" = true ] && return; sleep 1; done
  echo "$1 stays down"; exit 1
}
start=$(docker ps -a --format '{{.Names}}' | grep -- '-start-1$')
for _ in $(seq 240); do [ -e "$run/tape/round-00001.safetensors" ] && break; sleep 1; done
[ -e "$run/tape/round-00001.safetensors" ] || { echo "no first round"; docker logs "$start" | tail; exit 1; }
for each in supernode-1 ray-worker attack dashboard; do one=$(name $each); fall $each; back "$one"; done
one=$(name superlink); fall superlink; back "$one"
for _ in $(seq 120); do [ -e "$run/tape/round-00003.safetensors" ] && break; sleep 1; done
one=$(name ray-head); fall ray-head; back "$one"
token=$(cat federation/secrets/dashboard)
page=$(docker port "$(name dashboard)" 8765)
for _ in $(seq 30); do
  code=$(curl -sS --noproxy '*' -o /dev/null -w '%{http_code}' "http://$page/?token=$token" || true)
  [ "$code" = 303 ] && break; sleep 1
done
[ "$code" = 303 ] || { echo "the page answered $code"; exit 1; }
! docker logs "$(name dashboard)" 2>&1 | grep -q "$token" || { echo "the page's log holds its token"; exit 1; }
status=$(timeout 900 docker wait "$start")
say "start ended with $status"
[ "$status" = 0 ] || { docker logs "$start" | tail; exit 1; }
fg export "$run" > "$WORK/scores.csv"
fg report "$run" > /dev/null && [ -s "$run/report.html" ]
python3 - "$WORK/scores.csv" "$run" <<'P'
import csv, pathlib, sys
from collections import Counter
rows = list(csv.DictReader(open(sys.argv[1])))
keys = Counter((r["round"], r["client"], r["attack"], r["example"], r["metric"]) for r in rows)
assert keys and max(keys.values()) == 1, "a score is there twice"
graded = {(r["round"], r["client"]) for r in rows if r["attack"] == "inverting_gradients" and r["metric"] == "psnr" and r["value"]}
assert {c for _, c in graded} == {"0", "1", "2"} and {r for r, _ in graded} == {"1", "2", "3"}, f"graded: {sorted(graded)}"
assert {("1", "0"), ("1", "1"), ("1", "2")} <= graded and len(graded) >= 7, f"graded: {sorted(graded)}"
print(f"{len(rows)} scores of {len(graded)} updates, none twice")
P
for c in $(docker ps -aq); do # what the compose file promises of each
  docker inspect -f '{{.Name}} {{.HostConfig.ReadonlyRootfs}} {{.HostConfig.CapDrop}} {{.HostConfig.SecurityOpt}} {{.Config.User}}' "$c"
done | awk '$2 != "true" || $3 != "[ALL]" || $4 !~ /no-new-privileges/ || $5 ~ /^0/ { print "not hardened:", $0; bad = 1 } END { exit bad }'
say "all held"
