#!/bin/sh
# docker compose for a deployment's folder:  ./compose.sh FOLDER up --detach  (or ps, logs, down)
# Before `up` starts anything, it checks what would stop it halfway. A refusal ends with status 2 and names the remedy.
set -eu
here=$(dirname "$0")
folder=${1:?the folder of a deployment, then a command of docker compose, such as: up --detach}
shift
compose() { docker compose --project-directory "$folder" -f "$here/docker-compose.yml" -f "$folder/compose.override.yaml" "$@"; }
refuse() { echo "compose.sh: $*" >&2; exit 2; }
setting() { # the shell's, the folder's, or the default
  eval "value=\${$1-}"
  [ -n "$value" ] || value=$(sed -n "s/^$1=//p" "$folder/.env" | tail -n 1 | tr -d '"')
  echo "${value:-$2}"
}
listens() { # a process of this machine, on any address
  cat /proc/net/tcp /proc/net/tcp6 2> /dev/null |
    awk -v port=":$(printf %04X "$1")" '$4 == "0A" && substr($2, length($2) - 4) == port { found = 1 } END { exit !found }'
}

check() {
  docker version > /dev/null 2>&1 || refuse "the Docker engine does not answer: start it, or call this as root or in the group docker"
  version=$(docker compose version --short 2> /dev/null) || version=none
  case ${version#v} in
    [2-9]*) ;;
    *) refuse "docker compose 2 or later is needed, found: $version. Install the package docker-compose-v2 or docker-compose-plugin" ;;
  esac
  uid=$(setting FEDGAUGE_UID 10001)
  other=$(find "$folder" ! -user "$uid" | head -n 1)
  [ -z "$other" ] || refuse "$other does not belong to user $uid, as whom the containers run. As root: chown -R $uid $folder"
  for file in tls/ca.crt tls/server.crt tls/server.key secrets/superexec secrets/ray secrets/dashboard; do
    [ -s "$folder/$file" ] || refuse "$folder/$file is missing: restore it, or create another folder with fedgauge deploy init"
  done
  for file in "$folder"/public/client-*.pub; do
    client=${file##*/client-} && client=${client%.pub}
    case " $(setting FEDGAUGE_ELSEWHERE "") " in *" supernode-$client "*) continue ;; esac
    [ -s "$folder/keys/client-$client" ] || refuse "$folder/keys/client-$client is missing: restore it, or add supernode-$client to" \
      "FEDGAUGE_ELSEWHERE in $folder/.env if that client runs on another host"
  done
  image=fedgauge:$(setting FEDGAUGE_VERSION 0.1.0)
  format=$(docker image inspect --format '{{index .Config.Labels "fedgauge.format"}}' "$image" 2> /dev/null) ||
    refuse "there is no image $image on this machine: docker build -t $image $here"
  [ "${format:-0}" -ge "$(setting FEDGAUGE_FORMAT 0)" ] 2> /dev/null || refuse "the image $image is older than $folder: docker build -t $image $here"
  [ -z "$(compose ps --quiet superlink 2> /dev/null)" ] || return 0 # it holds these ports itself
  for port in FEDGAUGE_PORT=8000 FEDGAUGE_VIEW_PORT=8765; do
    number=$(setting "${port%=*}" "${port#*=}")
    ! listens "$number" || refuse "port $number is in use: end what listens on it, or write ${port%=*}=another into $folder/.env"
  done
}

[ -d "$folder" ] || refuse "$folder does not exist: create it with fedgauge deploy init"
[ -r "$folder" ] && [ -x "$folder" ] || refuse "$folder belongs to another user: call this as its owner, or as root"
for file in .env compose.override.yaml scenario.toml; do
  [ -e "$folder/$file" ] || refuse "$folder is not a deployment, as it lacks $file: create one with fedgauge deploy init"
done
if [ "${1-}" = up ]; then
  check
  shift
  for service in $(setting FEDGAUGE_ELSEWHERE ""); do set -- --scale "$service=0" "$@"; done
  set -- up "$@"
fi
compose "$@"
