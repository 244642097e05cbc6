"""Calls that wait for a client, answered by the official SDK, also after the server was killed.

COVEY_BIN names the `covey` to start; the model is the scripted one with ../script.json (see ../README.md).
"""

import json
import os
import pathlib
import signal
import subprocess
import tempfile
import unittest

import anthropic

COVEY = os.environ["COVEY_BIN"]
SCRIPT = pathlib.Path(__file__).parent.parent / "script.json"
# A session that is stuck shall fail the test, not hold it.
SECONDS_MAX = 180

ASKING = {
    "type": "agent_toolset_20260401",
    "configs": [{"name": "bash", "permission_policy": {"type": "always_ask"}}],
}
DEPLOY = {
    "type": "custom",
    "name": "deploy",
    "description": "Ships it.",
    "input_schema": {"type": "object", "properties": {"to": {"type": "string"}}, "required": ["to"]},
}


def strict(thing):
    """The SDK builds its types without looking; this looks."""
    type(thing).model_validate(thing.to_dict(mode="json"))
    return thing


def text_of(event):
    return "".join(block.text for block in event.content or [] if block.type == "text")


class Approvals(unittest.TestCase):
    def setUp(self):
        def too_long(signum, frame):
            raise TimeoutError(f"not done within {SECONDS_MAX} s")

        signal.signal(signal.SIGALRM, too_long)
        signal.alarm(SECONDS_MAX)
        self.data = tempfile.TemporaryDirectory(prefix="covey-approvals-")
        self.start()

    def tearDown(self):
        self.client.close()
        self.server.terminate()
        self.assertEqual(self.server.wait(), 0)
        self.data.cleanup()
        signal.alarm(0)

    def start(self):
        """Starts the server on the data directory and connects to it."""
        place = pathlib.Path(self.data.name) / "client.json"
        place.unlink(missing_ok=True)
        command = [COVEY, "up", "--listen", "127.0.0.1:0", "--data-dir", self.data.name]
        self.server = subprocess.Popen(command + ["--model-script", str(SCRIPT)], stdin=subprocess.DEVNULL)
        while not place.exists():
            if self.server.poll() is not None:
                self.fail(f"the server ended with {self.server.returncode}")
            signal.sigtimedwait([], 0.05)
        client = json.loads(place.read_text())
        self.client = anthropic.Anthropic(base_url=client["url"], api_key=client["token"])
        self.beta = self.client.beta

    def kill(self):
        self.server.kill()
        self.server.wait()
        self.client.close()

    def session(self, text, tools):
        agent = strict(self.beta.agents.create(name="asks", model="scripted", tools=tools))
        environment = self.beta.environments.create(name="e", config={"type": "self_hosted"})
        begin = {"type": "user.message", "content": [{"type": "text", "text": text}]}
        return self.beta.sessions.create(agent=agent.id, environment_id=environment.id, initial_events=[begin])

    def events(self, session):
        """Those that the API has; Covey's own the SDK hands on without a type."""
        kinds = ("user.", "agent.", "session.", "span.")
        events = self.beta.sessions.events.list(session.id)
        return [strict(event) for event in events if event.type.startswith(kinds)]

    def idle(self, session, stop_reason):
        """The events up to the first idle with this reason that is the last event of its kind."""
        while True:
            events = self.events(session)
            status = [event for event in events if event.type.startswith("session.status_")]
            if status and status[-1].type == "session.status_idle":
                if status[-1].stop_reason.type == stop_reason:
                    return events, status[-1].stop_reason
            signal.sigtimedwait([], 0.05)

    def of_kind(self, events, kind):
        return [event for event in events if event.type == kind]

    def confirm(self, session, call, **word):
        event = {"type": "user.tool_confirmation", "tool_use_id": call, **word}
        return self.beta.sessions.events.send(session.id, events=[event])

    def test_a_call_that_asks_is_allowed_after_the_server_was_killed_and_runs_once(self):
        session = self.session("SDK: ask first", [ASKING])
        events, reason = self.idle(session, "requires_action")
        (use,) = self.of_kind(events, "agent.tool_use")
        self.assertEqual((use.evaluated_permission, use.evaluation.type), ("ask", "always_ask"))
        self.assertEqual(reason.event_ids, [use.id])
        self.assertEqual(self.of_kind(events, "agent.tool_result"), [])

        self.kill()
        self.start()
        self.assertEqual(self.beta.sessions.retrieve(session.id).status, "idle")
        self.assertEqual(self.idle(session, "requires_action")[1].event_ids, [use.id])
        (sent,) = self.confirm(session, use.id, result="allow").data
        self.assertEqual((sent.type, sent.tool_use_id), ("user.tool_confirmation", use.id))
        events, _ = self.idle(session, "end_turn")
        (result,) = self.of_kind(events, "agent.tool_result")
        # The call appends a line to a file and counts them.
        self.assertEqual((result.tool_use_id, text_of(result).strip()), (use.id, "1"))
        self.assertEqual([text_of(m) for m in self.of_kind(events, "agent.message")][-1], "It ran.")
        self.assertTrue(all(event.processed_at for event in self.of_kind(events, "user.tool_confirmation")))

        with self.assertRaises(anthropic.ConflictError):
            self.confirm(session, use.id, result="allow")
        with self.assertRaises(anthropic.BadRequestError):
            self.confirm(session, result.id, result="allow")
        with self.assertRaises(anthropic.BadRequestError):
            self.confirm(session, use.id, result="allow", deny_message="both")

    def test_a_denied_call_never_runs_and_the_model_is_told_why(self):
        session = self.session("SDK: ask first", [ASKING])
        _, reason = self.idle(session, "requires_action")
        self.confirm(session, reason.event_ids[0], result="deny", deny_message="not on a Friday")
        events, _ = self.idle(session, "end_turn")
        (result,) = self.of_kind(events, "agent.tool_result")
        self.assertTrue(result.is_error)
        self.assertIn("not on a Friday", text_of(result))

    def test_a_tool_of_the_client_is_answered_by_the_client_after_the_server_was_killed(self):
        session = self.session("SDK: deploy", [DEPLOY])
        events, reason = self.idle(session, "requires_action")
        (use,) = self.of_kind(events, "agent.custom_tool_use")
        self.assertEqual((use.name, use.input, reason.event_ids), ("deploy", {"to": "production"}, [use.id]))
        self.kill()
        self.start()
        result = {
            "type": "user.custom_tool_result",
            "custom_tool_use_id": use.id,
            "content": [{"type": "text", "text": "shipped"}],
        }
        self.beta.sessions.events.send(session.id, events=[result])
        events, _ = self.idle(session, "end_turn")
        self.assertEqual([text_of(m) for m in self.of_kind(events, "agent.message")][-1], "It is live.")
        with self.assertRaises(anthropic.ConflictError):
            self.beta.sessions.events.send(session.id, events=[result])


if __name__ == "__main__":
    unittest.main()
