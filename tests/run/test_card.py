"""The card of a trained model says what its run's files say, and goes to a hub that is made up here."""

import base64
import json
import threading
from collections import defaultdict
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from huggingface_hub import ModelCard, constants

from grpo import Trainer
from grpo.logs.model_card import check_hub, model_card, push, usage
from grpo.model.names import source_of
from grpo.run.checkpoint import CheckpointFolder

SETTINGS = {
    "steps": 5,
    "batch_size": 16,
    "group_size": 8,
    "model": "some/base-model",
    "reward": ["policy"],
    "prompts": "some/data:main:train",
    "lora_rank": 0,
    "learning_rate": 1e-4,
    "kl_coef": 0.02,
    "name": "mine",
    "stop": ["END"],
}
EVALUATIONS = [
    {
        "step": 0,
        "eval_reward": 0.5,
        "eval_reward/low": 0.4,
        "eval_reward/high": 0.6,
        "eval_policy/legal": 0.25,
    },
    {"step": 3, "reward": 0.7},
    {
        "step": 5,
        "eval_reward": 0.75,
        "eval_reward/low": 0.7,
        "eval_reward/high": 0.8,
        "eval_policy/legal": None,
    },
]


def run_folder(folder, **changes):
    (folder / "config.yaml").write_text(json.dumps(SETTINGS | changes))  # which is YAML as well
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in EVALUATIONS))
    return folder


def test_a_card_says_what_the_files_of_its_run_say(tmp_path):
    text = model_card(run_folder(tmp_path))
    header = ModelCard(text).data
    assert header.base_model == "some/base-model" and header.datasets == "some/data"
    assert header.tags == ["grpo", "grpo-lean"] and header.library_name == "transformers"
    assert "5 steps of 16 completions in groups of 8" in text and "`policy`" in text
    assert "| | step 0 | step 5 |" in text
    assert "| reward | 0.500 (0.400 to 0.600) | 0.750 (0.700 to 0.800) |" in text
    assert "| policy/legal | 0.250 |  |" in text
    settings = text.partition("```yaml\n")[2]
    assert "learning_rate: 0.0001" in settings and "- END" in settings
    assert "kl_coef" not in settings and "mine" not in settings  # as by default; of the folder
    compile(usage(False), "usage", "exec")


def test_a_card_of_adapters_and_of_a_model_that_is_not_on_the_hub(tmp_path):
    text = model_card(run_folder(tmp_path, model="rook-tiny", prompts="bundled", lora_rank=8))
    header = ModelCard(text).data
    assert header.base_model is None and header.datasets is None and header.library_name == "peft"
    assert usage(True) in text
    compile(usage(True), "usage", "exec")


@pytest.fixture
def hub(monkeypatch):
    """Files that were sent to a hub of this machine, by path; large ones, and those of the commit."""
    sent, uploaded = defaultdict(list), {}

    class Hub(BaseHTTPRequestHandler):
        def answer(self):
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            sent[self.path].append(body)
            reply, url = {}, f"http://{self.headers['Host']}"
            if self.path.endswith("/whoami-v2"):
                reply = {"name": "me", "type": "user"}
            elif self.path.endswith("/repos/create"):
                reply = {"url": f"{url}/me/model", "name": "me/model"}
            elif "/preupload/" in self.path:
                names = [file["path"] for file in json.loads(body)["files"]]
                large = {name: "lfs" if name.endswith(".safetensors") else "regular" for name in names}
                reply = {
                    "files": [{"path": n, "uploadMode": m, "shouldIgnore": False} for n, m in large.items()]
                }
            elif self.path.endswith("/objects/batch"):
                objects = json.loads(body)["objects"]
                href = {"upload": {"href": f"{url}/put"}}
                reply = {"transfer": "basic", "objects": [item | {"actions": href} for item in objects]}
            elif "/commit/" in self.path:
                for line in map(json.loads, body.splitlines()):
                    if line["key"] == "file":
                        uploaded[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
                reply = {"commitUrl": f"{url}/me/model/commit/0", "commitOid": "0" * 40}
            content = json.dumps(reply).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        do_GET = do_POST = do_PUT = answer

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setattr("grpo.logs.model_card.endpoint", lambda: f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    yield sent, uploaded
    server.shutdown()


def test_a_model_is_pushed_with_its_card(tmp_path, hub, logged):
    sent, uploaded = hub
    (tmp_path / "README.md").write_text("A card.")
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    check_hub("me/model")
    push(tmp_path, "me/model", private=True)
    assert json.loads(sent["/api/repos/create"][0])["visibility"] == "private"
    assert uploaded == {"README.md": b"A card."} and sent["/put"] == [b"weights"]
    assert "pushed to" in logged[-1] and "me/model, private" in logged[-1]


def test_without_a_hub_it_is_told_at_once_and_nothing_stops(tmp_path, monkeypatch, logged):
    monkeypatch.setattr("grpo.logs.model_card.endpoint", lambda: "http://127.0.0.1:9")
    check_hub("me/model")
    assert "The run goes on" in logged[-1] and "hf upload me/model" in logged[-1]
    push(tmp_path, "me/model", private=True)
    assert f"hf upload me/model {tmp_path}" in logged[-1]


def test_the_model_to_use_has_its_card_and_a_run_that_is_done_goes_to_the_hub(config, hub):
    """A run that has been stopped pushes nothing."""
    _, uploaded = hub
    config = replace(config, push_to_hub="me/model", eval_interval=1, eval_prompts=4, name="stopped")
    for _ in Trainer(config):
        break
    assert (config.runs_dir / "stopped" / "model" / "README.md").is_file() and not uploaded
    Trainer(replace(config, name="done")).train()
    card = (config.runs_dir / "done" / "model" / "README.md").read_text()
    assert "2 steps of 8 completions" in card and "| | step 0 | step 2 |" in card
    assert uploaded["README.md"].decode() == card and "config.json" in uploaded


def test_what_is_pushed_is_the_last_step_even_where_its_folder_could_not_be_made(config, hub, monkeypatch):
    """Step 1 left a model/, and step 2 could not: the weights of step 2 go, without the optimizer's."""
    sent, uploaded = hub
    publish = CheckpointFolder._publish

    def refuse_the_second(self, checkpoint):
        if checkpoint.name == "step-000002":
            raise OSError("no space left on device")
        publish(self, checkpoint)

    monkeypatch.setattr(CheckpointFolder, "_publish", refuse_the_second)
    trainer = Trainer(replace(config, push_to_hub="me/model", checkpoint_interval=1))
    trainer.train()
    folder = trainer.run.folder
    assert not (folder / "model").exists()  # nobody takes step 1 for what was trained
    last = folder / "checkpoints" / "step-000002"
    assert trainer.run.checkpoints.to_use == last and source_of(str(folder)) == str(last)
    assert (last / "model.safetensors").read_bytes() in sent["/put"]
    assert not {name for name in uploaded if name.startswith(("trainer", "manifest"))}
    assert not [body for body in sent["/put"] if body == (last / "trainer.safetensors").read_bytes()]
