"""docs/deploy: nothing runs containers here, so its files are held to a schema, to a linter, and to each other."""

from __future__ import annotations

import copy
import http.server
import json
import re
import subprocess
import sys
import threading
from functools import cache
from pathlib import Path

import click
import pytest
import yaml

from pagedkv.cli.main import COMMANDS, pagedkv

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "docs" / "deploy"
BIN = Path(sys.executable).parent
DOCKERFILES = sorted(DEPLOY.glob("*.Dockerfile"))
COMPOSE = sorted(DEPLOY.glob("compose*.yaml"))
SERVICES = ("server", "prometheus", "grafana")
LINES = (
    "cap_drop",
    "security_opt",
    "read_only",
    "tmpfs",
    "user",
    "healthcheck",
    "restart",
    "init",
    "ulimits",
    "logging",
)
LINES += ("secrets", "networks", "image")

dockerfiles = pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.stem)


@cache
def read(name):
    return yaml.safe_load((DEPLOY / name).read_text("utf-8"))


def plain(value):
    """A value with every variable at its default, as Compose fills it in."""
    return re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", value) if isinstance(value, str) else value


def seconds(text):
    return int(re.fullmatch(r"(\d+)s", text)[1])


def schema(*paths):
    command = [str(BIN / "check-jsonschema"), "--builtin-schema", "vendor.compose-spec", *map(str, paths)]
    return subprocess.run(command, capture_output=True, text=True)


def hadolint(*paths):
    return subprocess.run([str(BIN / "hadolint"), "--no-color", *map(str, paths)], capture_output=True, text=True)


# -- schema and linter -------------------------------------------------------------------------------------------------


def test_the_compose_files_fit_their_schema(tmp_path):
    assert {path.name for path in COMPOSE} == {"compose.yaml", "compose.cuda.yaml"}
    done = schema(*COMPOSE)
    assert done.returncode == 0, done.stdout
    spoiled = tmp_path / "compose.yaml"
    spoiled.write_text((DEPLOY / "compose.yaml").read_text("utf-8").replace("read_only: true", "read_only: [yes]"))
    done = schema(spoiled)
    assert done.returncode == 1 and "read_only" in done.stdout


def test_hadolint_finds_nothing_in_the_dockerfiles(tmp_path):
    assert {path.name for path in DOCKERFILES} == {"cpu.Dockerfile", "cuda.Dockerfile"}
    done = hadolint(*DOCKERFILES)
    assert (done.returncode, done.stdout) == (0, "")
    text = DOCKERFILES[0].read_text("utf-8")
    for good, bad, rule in (
        ("python:3.12.11-slim-bookworm", "python:latest", "DL3007"),
        ('ENTRYPOINT ["pagedkv", "serve"]', "ENTRYPOINT pagedkv serve", "DL3025"),
        ("USER 10001:10001", "USER root", "DL3002"),
    ):
        assert good in text
        spoiled = tmp_path / f"{rule}.Dockerfile"
        spoiled.write_text(text.replace(good, bad))
        assert rule in hadolint(spoiled).stdout


# -- hardening ---------------------------------------------------------------------------------------------------------


def problems(service):
    """What a service of the Compose file lacks."""
    limits = service.get("deploy", {}).get("resources", {}).get("limits", {})
    tmpfs = {option for mount in service.get("tmpfs", ()) for option in mount.partition(":")[2].split(",")}
    held = {
        "cap_drop": service.get("cap_drop") == ["ALL"] and not service.get("cap_add"),
        "security_opt": "no-new-privileges:true" in service.get("security_opt", ()),
        "read_only": service.get("read_only") is True,
        "tmpfs": {"noexec", "nosuid", "nodev"} <= tmpfs and any(option.startswith("size=") for option in tmpfs),
        "user": re.fullmatch(r"[1-9]\d*:[1-9]\d*", service.get("user", "")) is not None,
        "healthcheck": service.get("healthcheck", {}).get("test", ["NONE"])[0] == "CMD",
        "restart": service.get("restart") == "unless-stopped",
        "init": service.get("init") is True,
        "ulimits": service.get("ulimits", {}).get("core") == 0,
        "logging": "max-size" in service.get("logging", {}).get("options", {}),
        "secrets": bool(service.get("secrets")),
        "ports": all(plain(port.get("host_ip")) == "127.0.0.1" for port in service.get("ports", ())),
        "networks": set(service.get("networks", ())) == {"front", "inner"},
        "image": re.fullmatch(r"[^:]+:(?!latest)[\w.-]+", service.get("image", "")) is not None,
        "cpus": "cpus" in limits,
        "memory": "memory" in limits,
        "pids": isinstance(limits.get("pids"), int),
        "privileged": not {"privileged", "network_mode", "pid", "ipc", "devices", "userns_mode"} & set(service),
    }
    return [name for name, fine in held.items() if not fine]


@pytest.mark.parametrize("name", SERVICES)
def test_every_service_is_hardened(name):
    assert set(read("compose.yaml")["services"]) == set(SERVICES)
    assert problems(read("compose.yaml")["services"][name]) == []


@pytest.mark.parametrize("name", SERVICES)
@pytest.mark.parametrize("key", LINES)
def test_a_line_of_hardening_that_is_gone_is_missed(name, key):
    service = copy.deepcopy(read("compose.yaml")["services"][name])
    del service[key]
    assert problems(service) == [key]


@pytest.mark.parametrize("name", SERVICES)
def test_a_limit_or_a_loopback_address_that_is_gone_is_missed(name):
    for limit in ("cpus", "memory", "pids"):
        service = copy.deepcopy(read("compose.yaml")["services"][name])
        del service["deploy"]["resources"]["limits"][limit]
        assert problems(service) == [limit]
    service = copy.deepcopy(read("compose.yaml")["services"][name])
    del service["ports"][0]["host_ip"]
    assert problems({**service, "privileged": True, "cap_add": ["SYS_ADMIN"]}) == ["cap_drop", "ports", "privileged"]


def test_nothing_but_the_front_network_leads_out_and_no_answer_comes_back():
    networks = read("compose.yaml")["networks"]
    assert networks["inner"] == {"internal": True}
    assert networks["front"]["driver_opts"] == {"com.docker.network.bridge.enable_ip_masquerade": "false"}


def test_the_server_reads_its_models_and_writes_nothing_to_them():
    volumes = {volume["target"]: volume for volume in read("compose.yaml")["services"]["server"]["volumes"]}
    assert set(volumes) == {"/models"} and volumes["/models"]["read_only"] is True
    assert read("compose.yaml")["services"]["server"]["memswap_limit"] == "${SERVER_MEMORY:-8g}"


def test_the_file_for_cards_adds_to_the_other_and_loosens_nothing_but_where_kernels_are_compiled():
    (base, cuda) = (read(name)["services"]["server"] for name in ("compose.yaml", "compose.cuda.yaml"))
    assert set(cuda) == {"image", "build", "command", "tmpfs", "deploy"}
    assert cuda["command"] == [*base["command"], "--backend=cuda"]
    assert [mount.split(":")[0] for mount in cuda["tmpfs"]] == ["/kernels"]
    assert "TRITON_CACHE_DIR=/kernels" in (DEPLOY / "cuda.Dockerfile").read_text("utf-8")
    assert set(cuda["deploy"]["resources"]) == {"reservations"}


# -- the files hold together -------------------------------------------------------------------------------------------


def command_options():
    with click.Context(pagedkv) as context:
        serve = pagedkv.get_command(context, "serve")
    return {flag: option for option in serve.params for flag in option.opts}


@pytest.mark.parametrize("name", ["compose.yaml", "compose.cuda.yaml"])
def test_the_command_has_flags_that_serve_knows(name):
    assert "serve" in COMMANDS
    model, *flags = read(name)["services"]["server"]["command"]
    assert plain(model) == "demo"
    assert {flag.partition("=")[0] for flag in flags} <= set(command_options())
    given = dict(flag.split("=") for flag in map(plain, flags) if not flag.startswith("--allowed-host"))
    assert given["--host"] == "0.0.0.0"
    assert [plain(flag) for flag in flags if "allowed" in flag] == ["--allowed-host=server", "--allowed-host=localhost"]


def test_a_server_that_drains_is_not_killed():
    service = read("compose.yaml")["services"]["server"]
    (drain,) = (int(flag.partition("=")[2]) for flag in service["command"] if flag.startswith("--drain-timeout="))
    assert seconds(service["stop_grace_period"]) >= drain + 10


def test_secrets_volumes_and_mounted_files_are_there():
    compose = read("compose.yaml")
    services = compose["services"].values()
    assert {secret for service in services for secret in service["secrets"]} == set(compose["secrets"])
    mounts = [volume for service in services for volume in service["volumes"] if isinstance(volume, str)]
    files = [mount for mount in mounts if mount.startswith("./")]
    assert len(files) == 5 and all(
        mount.endswith(":ro") and (DEPLOY / mount.split(":")[0]).is_file() for mount in files
    )
    named = {mount.split(":")[0] for mount in mounts if mount not in files}
    assert named | {"models"} == set(compose["volumes"])
    ignored = (ROOT / ".gitignore").read_text("utf-8").split()
    assert "/docs/deploy/secrets/" in ignored
    assert all(secret["file"].startswith("./secrets/") for secret in compose["secrets"].values())


def test_the_server_reads_the_keys_that_compose_mounts():
    service = read("compose.yaml")["services"]["server"]
    assert f"--api-key-file=/run/secrets/{service['secrets'][0]}" in service["command"]


def test_prometheus_asks_the_server_with_its_key():
    config, compose = read("prometheus.yml"), read("compose.yaml")
    (scrape,) = config["scrape_configs"]
    prometheus, server = (compose["services"][name] for name in ("prometheus", "server"))
    assert scrape["static_configs"] == [{"targets": [f"server:{server['ports'][0]['target']}"]}]
    assert scrape["authorization"]["credentials_file"] == f"/run/secrets/{prometheus['secrets'][0]}"
    assert scrape["metrics_path"] == "/metrics"
    mounted = [volume.split(":")[1] for volume in prometheus["volumes"]]
    assert set(config["rule_files"]) < set(mounted)
    assert prometheus["command"][0] == f"--config.file={mounted[0]}"


def test_grafana_finds_prometheus_and_the_dashboard():
    (source,) = read("grafana/datasource.yml")["datasources"]
    assert source["url"] == f"http://prometheus:{read('compose.yaml')['services']['prometheus']['ports'][0]['target']}"
    (provider,) = read("grafana/dashboards.yml")["providers"]
    mounted = [volume.split(":")[1] for volume in read("compose.yaml")["services"]["grafana"]["volumes"]]
    assert any(target.startswith(provider["options"]["path"] + "/") for target in mounted)
    assert json.loads((DEPLOY / "grafana" / "pagedkv.json").read_text("utf-8"))["panels"]


# -- images ------------------------------------------------------------------------------------------------------------


def instructions(path):
    """(name, rest) of every instruction, continued lines joined."""
    text = re.sub(r"^#.*\n", "", path.read_text("utf-8"), flags=re.MULTILINE).replace("\\\n", " ")
    return [tuple(line.split(maxsplit=1)) for line in text.splitlines() if line.strip()]


@dockerfiles
def test_an_image_is_built_in_stages_and_runs_as_nobody_special(path):
    steps = instructions(path)
    bases = [rest for name, rest in steps if name == "FROM"]
    assert len(bases) == 2 and all(re.match(r"python:3\.\d+\.\d+-slim-\w+( AS build)?$", base) for base in bases)
    last = dict(steps[steps.index(("FROM", bases[1])) :])
    assert last["USER"] == "10001:10001" == read("compose.yaml")["services"]["server"]["user"]
    assert json.loads(last["ENTRYPOINT"]) == ["pagedkv", "serve"]
    assert json.loads(last["CMD"])[:3] == ["demo", "--host", "0.0.0.0"]
    assert {word for word in json.loads(last["CMD"]) if word.startswith("-")} <= set(command_options())
    assert last["EXPOSE"] == "8000" and last["STOPSIGNAL"] == "SIGTERM"


@dockerfiles
def test_what_an_image_copies_is_in_its_context(path):
    context = (ROOT / ".dockerignore").read_text("utf-8").split("\n")
    kept = [line[1:] for line in context if line.startswith("!")]
    assert "*" in context and "**/*.so" in context and all((ROOT / name).exists() for name in kept)
    copied = [rest.split()[:-1] for name, rest in instructions(path) if name == "COPY" and "--from" not in rest]
    assert sorted(source for sources in copied for source in sources) == sorted(kept)


@dockerfiles
def test_an_image_has_the_torch_that_everything_is_tested_with(path):
    (tested,) = re.findall(r"^torch==(\S+)", (ROOT / "ci" / "constraints.txt").read_text("utf-8"), re.MULTILINE)
    text = path.read_text("utf-8")
    assert re.findall(r"torch==(\S+)", text) == [tested]
    assert "constraints.txt" not in text  # whose triton is newer than the one that torch brings


def health_command(path):
    (check,) = (rest for name, rest in instructions(path) if name == "HEALTHCHECK")
    return json.loads(check.partition("CMD")[2])


class Health(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        good = {"/health": None, "/ready": "Bearer sk-probe"}.get(self.path, "") == self.headers["Authorization"]
        self.send_response(self.server.status if good else 404)
        self.end_headers()

    def log_message(self, *arguments):
        pass


@pytest.fixture
def health():
    with http.server.HTTPServer(("127.0.0.1", 0), Health) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


def test_the_health_check_tells_a_good_server_from_a_bad_one_and_from_none(health):
    command = read("compose.yaml")["services"]["server"]["healthcheck"]["test"][1:]
    assert all(health_command(path) == command for path in DOCKERFILES)
    assert command[0] == "python" and "8000" in command[2]
    code = command[2].replace("8000", str(health.server_port))
    for status, expected in ((200, 0), (503, 1)):
        health.status = status
        assert subprocess.run([sys.executable, "-c", code]).returncode == expected
    health.server_close()
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 1


# -- the guide ---------------------------------------------------------------------------------------------------------

GUIDE = (DEPLOY / "README.md").read_text("utf-8")


def test_the_guide_names_every_file_and_every_variable():
    files = {path.name for path in DEPLOY.iterdir() if path.is_file()} - {"README.md"}
    assert {name for name in files if f"`{name}`" not in GUIDE} == set()
    text = "".join(path.read_text("utf-8") for path in COMPOSE)
    defaults = dict(re.findall(r"\$\{(\w+):-([^}]*)\}", text))
    rows = [row.split("|")[1:3] for row in GUIDE.splitlines() if re.match(r"\| `[A-Z]", row)]
    table = {
        name: default
        for names, values in rows
        for name, default in zip(re.findall(r"\w+", names), values.replace("`", "").split(",") * 2, strict=False)
    }
    assert {name: default.strip() for name, default in table.items()} == defaults
    assert not [name for name in defaults if name.startswith("PAGEDKV_")]  # which the command would take for its own


def test_the_guides_commands_are_ours():
    for words in re.findall(r"pagedkv (api-key|serve)\b", GUIDE):
        assert words in COMMANDS
    assert "No container engine has run any of this here." in " ".join(GUIDE.split())
    flags = set(re.findall(r"`(--[a-z-]+)", GUIDE)) | set(re.findall(r" (--(?:host|api-key-file))=", GUIDE))
    assert len(flags) == 7 and flags <= set(command_options())


def test_a_pod_is_hardened_and_its_probes_ask_the_right_paths(health, tmp_path):
    pod = yaml.safe_load(re.search(r"```yaml\n(.*?)```", GUIDE, re.DOTALL)[1])
    (container,) = pod["containers"]
    assert pod["securityContext"]["runAsNonRoot"] and pod["securityContext"]["runAsUser"] == 10001
    assert container["securityContext"]["readOnlyRootFilesystem"] is True
    assert container["securityContext"]["allowPrivilegeEscalation"] is False
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    assert {container[probe]["httpGet"]["path"] for probe in ("startupProbe", "livenessProbe")} == {"/health"}
    assert {volume["name"] for volume in pod["volumes"]} == {mount["name"] for mount in container["volumeMounts"]}
    assert pod["volumes"][0]["secret"]["defaultMode"] == 0o440
    code = container["readinessProbe"]["exec"]["command"][2].replace("8000", str(health.server_port))
    (tmp_path / "probe.key").write_text("sk-probe\n")
    code = code.replace("/run/secrets/pagedkv/", f"{tmp_path}/")
    for status, expected in ((200, 0), (503, 1)):
        health.status = status
        assert subprocess.run([sys.executable, "-c", code]).returncode == expected
