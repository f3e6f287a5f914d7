#!/usr/bin/env bash
# The containers of docs/deploy.md, built and run for real, with faults: on Debian 12 or 13, as root, with apt and pip's index in reach.
#   tests/load/containers.sh [CHECKOUT]   status 0: all held; 1: something failed; 77: cannot be done here
# It needs no image registry: the base image is made by debootstrap. Settings: TORCH_INDEX, the Dockerfile's build argument; WHEELS, a folder
# of wheels for pip in the image, where an index is out of reach; MIRROR, Debian's; WORK, a folder for everything; KEEP=1 leaves it;
# PARTS, functions below that are called.
# About 15 minutes on two idle cores, 8 GB of disk in $WORK. It ends what it started, and removes what it made, but for apt's packages.
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
{ printf '*filter\n:FORWARD ACCEPT\nCOMMIT\n*nat\nCOMMIT\n'; iptables-save; } > "$WORK/rules" # empty, where there were none
while iptables --delete FORWARD --jump DOCKER-USER 2> /dev/null; do :; done # an earlier engine's: this one's comes first
setsid dockerd --config-file "$WORK/daemon.json" > "$WORK/dockerd.log" 2>&1 &
engine=$!
finish() {
  status=$?
  [ $status = 0 ] || { docker ps --all; for each in $(docker ps --all --quiet); do echo "== $each"; docker logs --tail 12 "$each" 2>&1; done; } || true
  docker ps --all --quiet | xargs --no-run-if-empty docker rm --force > /dev/null 2>&1 || true
  docker network prune --force > /dev/null 2>&1 || true
  kill "$engine" 2> /dev/null && wait "$engine" 2> /dev/null || true
  findmnt --noheadings --raw --output TARGET | grep "^$WORK/" | sort --reverse | xargs --no-run-if-empty umount || true # runs/, and the engine's
  echo "$forwarding" > /proc/sys/net/ipv4/ip_forward
  iptables-restore < "$WORK/rules" # the engine leaves its chains behind, and drops what is forwarded
  [ -n "${KEEP:-}" ] || rm -rf "$WORK"
  exit $status
}
trap finish EXIT
for _ in $(seq 60); do docker info > /dev/null 2>&1 && break; sleep 0.5; done
docker info > /dev/null 2>&1 || skip "no engine starts here: $(tail -1 "$WORK/dockerd.log")"

# ---- the base image, by the name in the Dockerfile
docker() { # of the page's commands: what this machine needs in addition
  case $1 in
    build) command docker build --network host ${TORCH_INDEX:+--build-arg TORCH_INDEX="$TORCH_INDEX"} "${@:2}" ;;
    run)
      local words=("${@:2}") each
      if [ -n "$elsewhere" ]; then # its network in place of the machine's
        for each in "${!words[@]}"; do [ "${words[each]}" != host ] || unset "words[each]" "words[each-1]"; done
        words=(--network "container:$elsewhere" "${words[@]}")
      fi
      command docker run "${words[@]}" ;;
    *) command docker "$@" ;;
  esac
}
elsewhere="" # the container whose network is that of another host
base=$(sed -n 's/^FROM //p' "$checkout/Dockerfile" | head -1)
if ! docker image inspect "$base" > /dev/null 2>&1; then # kept by KEEP=1
  say "debootstrap $base"
  debootstrap --variant=minbase --include=ca-certificates,netbase,tzdata,python3.11,python3.11-venv,python3-distutils bookworm "$WORK/base" $mirror > "$WORK/debootstrap.log" 2>&1 || { tail "$WORK/debootstrap.log"; exit 1; }
  chroot "$WORK/base" python3.11 -m venv /usr/local # python and pip on PATH, where the true image has them
  [ ! -e /etc/ssl/certs/ca-certificates.crt ] || cp /etc/ssl/certs/ca-certificates.crt "$WORK/base/etc/ssl/certs/"
  [ -z "${WHEELS:-}" ] || cp -r "$WHEELS" "$WORK/base/wheels"
  tar -C "$WORK/base" --exclude=./var/cache/apt/archives/*.deb -c . |
    docker import -c 'ENV PATH=/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin' -c 'ENV LANG=C.UTF-8' \
      -c 'ENV PIP_CERT=/etc/ssl/certs/ca-certificates.crt PIP_FIND_LINKS=/wheels' - "$base" > /dev/null
  rm -rf "$WORK/base"
fi

# ---- the commands of docs/deploy.md: each line of its blocks is run as it is written there, by the words that it begins with
rm -rf "$WORK/checkout"
git clone -q "$checkout" "$WORK/checkout" && cd "$WORK/checkout"
sed -n '/^```sh$/,/^```$/{/^```/!p}' docs/deploy.md > "$WORK/commands"
: > "$WORK/tried"
page() {
  local line
  line=$({ grep -xF -- "$1" "$WORK/commands" || grep -F -- "$1" "$WORK/commands" || true; } | sort -u)
  [ "$(wc -l <<< "$line")" = 1 ] && [ -n "$line" ] || fail "the page has not one command with: $1"
  echo "$line" >> "$WORK/tried"
  say "\$ $line" >&2
  eval "$line"
}
fail() { echo "failed: $*"; exit 1; }
until_true() { # SECONDS WHAT COMMAND...
  for _ in $(seq "$1"); do "${@:3}" > /dev/null 2>&1 && return; sleep 1; done
  fail "waited $1 s in vain for $2"
}
run=federation/runs/federation
name() { docker ps --all --format '{{.Names}}' | grep -- "-$1-1\$"; }
fall() { # from outside, as `docker kill` would leave it down; then it must run again
  local pid
  pid=$(docker inspect -f '{{.State.Pid}}' "$(name "$1")")
  kill -9 "$pid"
  say "killed $1"
  until_true 90 "$1 to run again" runs_again "$1" "$pid"
}
running() { [ "$(docker inspect -f '{{.State.Running}}' "$(name "$1")")" = true ]; }
runs_again() { running "$1" && [ "$(docker inspect -f '{{.State.Pid}}' "$(name "$1")")" != "$2" ]; }
reached() { [ -e "$run/tape/round-0000$1.safetensors" ]; }
recorded() { until_true 400 "round $1" reached "$1"; say "round $1 is recorded"; }
ended() { # STATUS...: that of `start`
  local status
  status=$(page "docker wait")
  say "start ended with $status"
  case " $* " in *" $status "*) return ;; esac
  docker logs "$(name start)" 2>&1 | tail
  fail "status $status, not $*"
}
refused() { # WORD: by compose.sh, before it starts anything
  local before said
  before=$(docker ps --all --quiet | wc -l)
  ! said=$(./compose.sh federation up --detach 2>&1) || fail "not refused: $1"
  case $said in *"$1"*) say "refused: $said" ;; *) fail "without its remedy ($1): $said" ;; esac
  [ "$(docker ps --all --quiet | wc -l)" = "$before" ] || fail "something was started"
}
scores() { # LEAST: every score once, of at least so many updates, every client's among them
  fedgauge export "$run" > "$WORK/scores.csv"
  python3 - "$WORK/scores.csv" "$1" <<'P'
import csv, sys
from collections import Counter
rows = list(csv.DictReader(open(sys.argv[1])))
keys = Counter((r["round"], r["client"], r["attack"], r["example"], r["metric"]) for r in rows)
assert keys, "no score"
doubled = sum(n - 1 for n in keys.values())
graded = {(r["round"], r["client"]) for r in rows if r["attack"] == "inverting_gradients" and r["metric"] == "psnr" and r["value"]}
attacks = {a: {(r["round"], r["client"]) for r in rows if r["attack"] == a} for a in {r["attack"] for r in rows}}
attacked = set().union(*attacks.values())
lost = sum(len(attacked - of) for of in attacks.values())
print(f"{len(rows)} scores of {len(graded)} updates; lost {lost}, doubled {doubled}")
assert lost == doubled == 0, attacks
assert {c for _, c in graded} == {"0", "1", "2"} and {r for r, _ in graded} == {"1", "2", "3"}, f"graded: {sorted(graded)}"
assert len(graded) >= int(sys.argv[2]), f"graded: {sorted(graded)}"
P
}

SECONDS=0
page "docker build" > "$WORK/build.log" 2>&1 || { tail -20 "$WORK/build.log"; exit 1; }
say "built in $SECONDS s: $(docker images --format '{{.Size}}' fedgauge:0.1.0)"
layers() { docker image inspect -f '{{join .RootFS.Layers "\n"}}' "$1" | sort; }
echo "# changed" >> client/__init__.py
docker build --quiet -t changed . > /dev/null && git checkout --quiet client
size=$(docker history --human=false --no-trunc --format '{{.Size}} {{.CreatedBy}}' changed |
  awk '/-r requirements.txt/ { exit } { bytes += $1 } END { printf "%d", bytes / 1e6 }') # above the dependencies' layer
new=$(comm -13 <(layers fedgauge:0.1.0) <(layers changed) | wc -l)
say "a change of the code: $new layers, $size MB"
[ "$new" -le 7 ] && [ "$size" -lt 100 ] || fail "too much is installed again"
page "mkdir federation"
page "fedgauge()"

# ---- on one host; what is wrong is refused before anything is started
one_host() {
  SECONDS=0
  page "deploy init federation --clients 3 --grading"
  say "init: $SECONDS s"
  mv federation/secrets/ray "$WORK/ray" && refused "restore it" && mv "$WORK/ray" federation/secrets/ray
  chown 0 federation/scenario.toml && refused "chown" && chown 10001 federation/scenario.toml
  docker tag fedgauge:0.1.0 kept && docker rmi fedgauge:0.1.0 > /dev/null && refused "docker build" && docker tag "$base" fedgauge:0.1.0
  refused "docker build" && docker tag kept fedgauge:0.1.0
  python3 -m http.server --bind 127.0.0.1 8765 > /dev/null 2>&1 & busy=$!
  until_true 20 "a port that is in use" grep -q :223D /proc/net/tcp
  refused "FEDGAUGE_VIEW_PORT" && kill $busy
  if ! DOCKER_CONFIG=$WORK/none command docker compose version > /dev/null 2>&1; then # it is nowhere else on this machine
    (DOCKER_CONFIG=$WORK/none refused "docker-compose-v2") || exit 1
  fi

  SECONDS=0
  mount -t tmpfs -o size=1g,uid=10001,gid=10001,mode=700 none federation/runs # to be filled
  page "./compose.sh federation up --detach"
  say "up: $SECONDS s"
  recorded 1
  say "up to the first round: $SECONDS s"
  for each in supernode-1 ray-worker attack dashboard superlink; do fall $each; done
  until_true 400 "round 2, or the end of the run" eval 'reached 2 || ! running start'
  if ! running start; then # on a busy machine the SuperLink was away for too long
    say "the run failed with the SuperLink"
    page "./compose.sh federation up --detach"
  fi
  recorded 2
  fall serverapp
  ended 1
  page "--scale ray-worker"
  dd if=/dev/zero of=federation/runs/ballast bs=1M 2> /dev/null || say "the disk is full"
  ended 1 2 # of the ServerApp's failure, or of its own, whichever meets it first
  rm federation/runs/ballast
  page "./compose.sh federation up --detach"
  kill -9 "$(docker inspect -f '{{.State.Pid}}' "$(name start)")"
  ended 137 # the ServerApp trains on
  page "./compose.sh federation up --detach"
  recorded 3
  fall ray-head
  token=$(cat federation/secrets/dashboard)
  answer() { [ "$(curl -sS --noproxy '*' -o /dev/null -w '%{http_code}' "http://$(docker port "$(name dashboard)" 8765)/?token=$token")" = 303 ]; }
  until_true 30 "the page" answer
  ! docker logs "$(name dashboard)" 2>&1 | grep -q "$token" || fail "the page's log holds its token"
  ended 0
  page "fedgauge report" > /dev/null && [ -s "$run/report.html" ]
  scores 6
  for c in $(docker ps -aq); do # what the compose file promises of each
    docker inspect -f '{{.Name}} {{.HostConfig.ReadonlyRootfs}} {{.HostConfig.CapDrop}} {{.HostConfig.SecurityOpt}} {{.Config.User}}' "$c"
  done | awk '$2 != "true" || $3 != "[ALL]" || $4 !~ /no-new-privileges/ || $5 ~ /^0/ { print "not hardened:", $0; bad = 1 } END { exit bad }'
  page "federation down"
}

# ---- several hosts: networks of their own for the owner's machine, which is an attack worker's too, and for a stranger's
several_hosts() {
  say "several hosts"
  rmdir federation 2> /dev/null || mv federation first
  page "mkdir federation"
  page "--host fed.example"
  page "FEDGAUGE_BIND"
  host() { # NAME NETWORK: a container that has the second address in a network of which this machine has the first
    command docker run --detach --name "$1" --network none --add-host "fed.example:$2.1" --add-host "wrong.example:$2.1" fedgauge:0.1.0 sleep infinity > /dev/null
    local pid
    pid=$(docker inspect -f '{{.State.Pid}}' "$1")
    ip link add "fed-$1" type veth peer name "fed-$1-1"
    ip link set "fed-$1-1" netns "/proc/$pid/ns/net" name eth0
    ip addr add "$2.1/24" dev "fed-$1" && ip link set "fed-$1" up
    nsenter --net="/proc/$pid/ns/net" sh -c "ip addr add $2.2/24 dev eth0; ip link set eth0 up; ip route add default via $2.1"
  }
  host owner 198.51.100
  host stranger 203.0.113
  sed -i 's/^mode = "off"/mode = "scores"/' federation/clients/*/client.toml # each owner agrees to grading
  mkdir -p "$WORK/owner/clients" && cp federation/tls/ca.crt federation/keys/client-0 "$WORK/owner" && cp -r federation/clients/0 "$WORK/owner/clients"
  rm federation/keys/client-0
  chown -R 10001:10001 "$WORK/owner"
  refused FEDGAUGE_ELSEWHERE
  page 'FEDGAUGE_ELSEWHERE="supernode-0 attack'
  page "./compose.sh federation up --detach"
  until_true 120 "the SuperLink" docker exec owner python -c "import socket; socket.create_connection(('fed.example', 8000), 3)"
  reach() { docker exec "$1" python -c "import socket; socket.create_connection(('fed.example', 8000), 5)" 2> /dev/null; }
  reach stranger || fail "no port is open before the rule"
  page "iptables"
  ! reach stranger || fail "the rule stops nobody"
  reach owner || fail "the rule stops the owner"
  (cd "$WORK/owner" && elsewhere=owner && page "flower-supernode" > "$WORK/supernode.log" 2>&1 &)
  page "node()"
  (cd federation && page "ray start --head" > /dev/null)
  (cp -r federation/ray "$WORK/owner" && cd "$WORK/owner" && elsewhere=owner && page "ray start --address" > /dev/null)
  until_true 180 "the run" [ -s "$run/training.lock" ]
  (cd federation && page "fedgauge audit" > "$WORK/audit")
  recorded 1
  cut=$(docker inspect -f '{{range $name, $_ := .NetworkSettings.Networks}}{{$name}}{{end}}' "$(name supernode-2)")
  docker network disconnect "$cut" "$(name supernode-2)" && say "cut supernode-2 off"
  sleep 30
  docker network connect "$cut" "$(name supernode-2)" && say "supernode-2 is back"
  key='from pathlib import Path; from fedgauge.server.pki import write_node_key; write_node_key(Path("/data/strange"))'
  docker run --rm -v "$WORK/owner:/data" --user 10001:10001 fedgauge:0.1.0 python -c "$key"
  (
    cd "$WORK/owner" && elsewhere=owner
    refuses() { # REASON SED: the owner's command, changed so, next to the client that has the usual port
      local status=0
      timeout 300 bash -c "$(declare -f docker); elsewhere=owner; $(grep flower-supernode "$WORK/commands" | sed "s#flower-supernode#& --port 9095#; $2")" > "$WORK/refused.log" 2>&1 || status=$?
      [ $status != 0 ] && [ $status != 124 ] && ! grep -q "SuperNode ID:" "$WORK/refused.log" || fail "let in, or tries on (status $status): $2"
      grep -i "$1" "$WORK/refused.log" > "$WORK/reason" || { tail "$WORK/refused.log"; fail "not refused by its $1: $2"; }
      say "not let in: $(tail -1 "$WORK/reason")"
    }
    refuses "exit code: 305" 's#private-key /data/client-0#private-key /data/strange#'
    refuses certificate 's#superlink fed.example#superlink wrong.example#'
  )
  ended 0
  scores 9
  docker logs "$(cat "$WORK/audit")" 2>&1 | tail -2
  page "./compose.sh federation down"
}

for part in ${PARTS:-one_host several_hosts}; do "$part"; done
[ -n "${PARTS:-}" ] || sort -u "$WORK/tried" | diff - <(sort -u "$WORK/commands") || fail "commands of the page that were not run"
say "all held"
