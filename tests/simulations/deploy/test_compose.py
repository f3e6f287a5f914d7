"""docker-compose.yml gives each container no more than it needs."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from fedgauge.simulations.deploy.folder import HARDENED, IN_COMPOSE, MEMORY, VERSION, container, override

ROOT = Path(__file__).resolve().parents[3]
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
SERVICES: dict[str, Any] = COMPOSE["services"]
CLUSTER = ("ray-head", "ray-worker", "ray-worker-gpu")
GPUS = "${FEDGAUGE_GPUS:-1}"
SECRET = {"tls/server.key", "keys", "secrets"}

_CONDITIONS = {"service_started", "service_healthy", "service_completed_successfully"}


def merged(clients: int) -> dict[str, Any]:
    """The services of a deployment: the file and its override, as compose puts them together."""
    other = yaml.safe_load(override(clients))
    both = {name: {**SERVICES.get(name, {}), **table} for name, table in other["services"].items()}
    return {
        "services": {**SERVICES, **both},
        "secrets": {**COMPOSE["secrets"], **other["secrets"]},
        "networks": COMPOSE["networks"],
    }


@pytest.fixture(params=[1, 3, 5], ids=lambda n: f"{n} clients")
def file(request: pytest.FixtureRequest) -> dict[str, Any]:
    return merged(request.param)


def test_what_runs_once_is_not_restarted_and_secrets_are_no_environment() -> None:
    policies = {"register": "no", "start": "no", "attack": "on-failure"}
    for name in SERVICES.keys() - set(CLUSTER):
        assert SERVICES[name]["restart"] == policies.get(name, "unless-stopped"), name
        assert name == "attack" or set(SERVICES[name]["environment"]) == {"WAITS_FOR"}


def test_everyone_in_rays_cluster_needs_its_token() -> None:
    access = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": "/deployment/secrets/ray"}
    access["WAITS_FOR"] = SERVICES["ray-head"]["environment"]["WAITS_FOR"]
    assert all(SERVICES[name]["environment"] == access for name in CLUSTER)
    attack = dict(SERVICES["attack"]["environment"], WAITS_FOR=access["WAITS_FOR"])
    assert attack == access | {"RAY_ADDRESS": "ray-head:6379"}


def test_each_container_says_what_it_waits_for(file: dict[str, Any]) -> None:
    assert all(service["environment"]["WAITS_FOR"] for service in file["services"].values() if service.get("scale", 1))
    assert "$WAITS_FOR" in (ROOT / "Dockerfile").read_text()


@pytest.mark.parametrize("client", range(IN_COMPOSE))
def test_the_override_writes_a_supernode_as_the_file_does(client: int) -> None:
    assert dict(container(client)) == SERVICES[f"supernode-{client}"]


def test_there_is_a_supernode_for_each_client(file: dict[str, Any]) -> None:
    running = [n for n, s in file["services"].items() if n.startswith("supernode-") and s.get("scale", 1)]
    assert sorted(running) == [f"supernode-{k}" for k in range(len(running))]
    assert len({s["command"][s["command"].index("--auth-supernode-private-key") + 1] for n, s in file["services"].items()
                if n in running}) == len(running)  # fmt: skip


def conditions(service: dict[str, Any]) -> Iterator[tuple[str, str]]:
    for name, wanted in service.get("depends_on", {}).items():
        yield name, wanted["condition"]


def test_whatever_a_service_names_is_defined(file: dict[str, Any]) -> None:
    for name, service in file["services"].items():
        assert {s["source"] for s in service.get("secrets", [])} <= file["secrets"].keys(), name
        assert set(service["networks"]) <= file["networks"].keys(), name
        for other, condition in conditions(service):
            assert condition in _CONDITIONS and other in file["services"], name
            needed = file["services"][other]
            assert condition != "service_healthy" or "healthcheck" in needed, f"{name} waits for {other} in vain"
            assert condition != "service_completed_successfully" or needed["restart"] == "no", (
                f"{name}: {other} never ends"
            )
            shown = set(needed.get("profiles", []))
            assert shown <= set(service.get("profiles", [])), f"{name} needs {other}, which its profile does not start"


def test_no_container_has_more_rights_than_it_needs(file: dict[str, Any]) -> None:
    for name, service in file["services"].items():
        assert {k: service[k] for k in HARDENED} == dict(HARDENED), name
        for forbidden in ("privileged", "cap_add", "pid", "ipc", "network_mode", "devices", "build", "env_file"):
            assert forbidden not in service, f"{name}: {forbidden}"
        assert not service["user"].startswith(("0", "root"))


def test_ports_are_of_this_machine_alone_and_other_files_are_read_only_or_below(file: dict[str, Any]) -> None:
    for service in file["services"].values():
        for port in service.get("ports", []):
            assert re.fullmatch(r"(\$\{\w+:-127\.0\.0\.1\}|127\.0\.0\.1):\$\{\w+:-\d+\}:\d+", port), port
        for volume in service.get("volumes", []):
            source, target, *mode = volume.split(":")
            assert source.startswith("./") and target.startswith("/") and mode in ([], ["ro"]), volume


def test_no_container_takes_all_memory_or_processes_of_its_machine_or_logs_without_end(file: dict[str, Any]) -> None:
    for name, service in file["services"].items():
        assert service["mem_limit"] == service["memswap_limit"] == f"${{FEDGAUGE_MEMORY:-{MEMORY}}}", f"{name}: no swap"
        assert re.fullmatch(r"[1-9]\d?g", MEMORY)
        assert 0 < service["pids_limit"] <= 4096, name
        assert service["logging"]["driver"] == "json-file", name
        kept = service["logging"]["options"]
        assert re.fullmatch(r"\d{1,2}m", kept["max-size"]) and 1 <= int(kept["max-file"]) <= 9, name
        assert "limits" not in service.get("deploy", {}).get("resources", {}), (
            f"{name}: two limits would contradict each other"
        )


def test_no_image_is_whatever_is_newest_today(file: dict[str, Any]) -> None:
    images = {s["image"] for s in file["services"].values()} | set(
        re.findall(r"^FROM (\S+)", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
    )
    assert images == {f"fedgauge:${{FEDGAUGE_VERSION:-{VERSION}}}", "python:3.11-slim"}
    assert f'version = "{VERSION}"' in (ROOT / "pyproject.toml").read_text()


def test_a_profile_starts_workers_on_cores_or_on_the_gpus_that_its_container_gets() -> None:
    """Docker gives containers that ask for one GPU the same one, so that one container has all of them."""
    assert (SERVICES["ray-worker"]["profiles"], SERVICES["ray-worker-gpu"]["profiles"]) == (["cpu"], ["gpu"])
    given = {name: s["deploy"]["resources"]["reservations"]["devices"] for name, s in SERVICES.items() if "deploy" in s}
    assert given == {"ray-worker-gpu": [{"driver": "nvidia", "count": GPUS, "capabilities": ["gpu"]}]}
    others = [name for name, s in SERVICES.items() if "profiles" in s]
    assert others == ["ray-worker", "ray-worker-gpu"], "what a profile leaves out, the other workers would miss"
    different = {"profiles", "command", "deploy"}
    cpu, gpu = ({k: v for k, v in SERVICES[name].items() if k not in different} for name in others)
    assert cpu == gpu


def test_secrets_travel_as_files_and_each_reaches_only_who_needs_it(file: dict[str, Any]) -> None:
    has = {name: {s["source"] for s in service.get("secrets", [])} for name, service in file["services"].items()}
    for name, sources in has.items():
        kind = re.sub(r"-\d+$", "", name)
        allowed = {
            "superlink": {"server-key", "superexec"},
            "serverapp": {"superexec"},
            "supernode": {name.replace("supernode", "client")},
            "ray-head": {"ray"}, "ray-worker": {"ray"}, "ray-worker-gpu": {"ray"}, "attack": {"ray"},
            "dashboard": {"dashboard"},
        }.get(kind, set())  # fmt: skip
        assert sources <= allowed, name
    for name, service in file["services"].items():
        mounted = {v.split(":")[0].removeprefix("./") for v in service.get("volumes", [])}
        assert not mounted & (SECRET | {"."}), f"{name} mounts a secret as an ordinary file"
        words = " ".join([*service["command"], *map(str, service.get("environment", {}).values())])
        assert not re.search(r"--token |password|BEGIN", words), name
    used = set().union(*has.values())
    assert used == set(file["secrets"]), "a secret that nobody uses need not be there"


def test_files_that_a_command_opens_are_mounted(file: dict[str, Any]) -> None:
    for name, service in file["services"].items():
        there = [v.split(":")[1] for v in service.get("volumes", [])]
        there += [s["target"] for s in service.get("secrets", [])]
        words = [*service["command"], *service.get("environment", {}).values()]
        opened = {path for word in words for path in re.findall(r"/deployment/[\w./-]+", word.split("${")[0])}
        for path in opened:
            assert any(path.rstrip("/") == t or path.startswith(f"{t}/") for t in there), f"{name}: {path}"


def test_each_client_sees_its_own_folder_and_key_alone(file: dict[str, Any]) -> None:
    for name, service in file["services"].items():
        for volume in service.get("volumes", []):
            if volume.startswith("./clients"):
                assert volume == "./clients/{0}:/deployment/clients/{0}".format(name.removeprefix("supernode-"))
    assert not any("clients" in v for n, s in file["services"].items() if not n.startswith("supernode-")
                   for v in s.get("volumes", []))  # fmt: skip


def test_only_attack_workers_are_in_the_network_of_the_attack_and_it_has_no_way_out() -> None:
    inside = {name for name, s in SERVICES.items() if "attack" in s["networks"]}
    assert inside == {"ray-head", "ray-worker", "ray-worker-gpu", "attack"}
    assert COMPOSE["networks"]["attack"]["internal"] is True
    assert all(SERVICES[name]["networks"] == ["attack"] for name in inside)


def test_the_image_runs_unprivileged_and_installs_pinned_versions() -> None:
    text = (ROOT / "Dockerfile").read_text()
    assert re.findall(r"^USER (.+)$", text, re.MULTILINE)[-1] == "10001:10001"
    installs = re.findall(r"pip install.*$", text, re.MULTILINE)
    assert len(installs) == 3 and all("constraints.txt" in line or "--no-deps . " in line for line in installs)
