"""The official SDK drives a session of Covey, with nothing changed but base URL and key.

COVEY_URL and COVEY_TOKEN name a server whose model is the scripted one with ../script.json (see ../README.md).
"""

import os
import signal
import unittest
import uuid

import anthropic

URL, TOKEN = os.environ["COVEY_URL"], os.environ["COVEY_TOKEN"]
# A session that is stuck shall fail the test, not hold it.
SECONDS_MAX = 120
KINDS_OF_THE_API = ("user.", "agent.", "session.", "span.")


def message(text):
    return {"type": "user.message", "content": [{"type": "text", "text": text}]}


def strict(thing):
    """The SDK builds its types without looking; this looks."""
    type(thing).model_validate(thing.to_dict(mode="json"))
    return thing


def text_of(event):
    return "".join(block.text for block in event.content or [] if block.type == "text")


class ManagedAgents(unittest.TestCase):
    def setUp(self):
        def too_long(signum, frame):
            raise TimeoutError(f"not done within {SECONDS_MAX} s")

        signal.signal(signal.SIGALRM, too_long)
        signal.alarm(SECONDS_MAX)
        self.client = anthropic.Anthropic(base_url=URL, api_key=TOKEN)
        self.beta = self.client.beta

    def tearDown(self):
        signal.alarm(0)
        self.client.close()

    def session(self, **more):
        name = f"sdk-python-{uuid.uuid4()}"
        agent = self.beta.agents.create(
            name=name, model="scripted", system="A test.", tools=[{"type": "agent_toolset_20260401"}]
        )
        environment = self.beta.environments.create(name=name, config={"type": "self_hosted"})
        session = self.beta.sessions.create(agent=agent.id, environment_id=environment.id, title=name, **more)
        for thing in (agent, environment, session):
            strict(thing)
        self.assertEqual((session.status, session.agent.id, session.agent.version), ("idle", agent.id, 1))
        return session

    def say(self, session, text, until="session.status_idle", stream=None):
        """Opens the stream, sends, and returns the events up to the first of the kind `until`."""
        if stream is None:
            with self.beta.sessions.events.stream(session.id) as stream:
                return self.say(session, text, until, stream)
        sent = self.beta.sessions.events.send(session.id, events=[message(text)])
        self.assertEqual([event.type for event in sent.data], ["user.message"])
        return self.events_until(stream, until)

    def events_until(self, stream, until):
        events = []
        for event in stream:
            # Covey's own the SDK hands on without a type.
            events.append(strict(event) if event.type.startswith(KINDS_OF_THE_API) else event)
            if event.type == until:
                return events
        self.fail(f"the stream ended before {until}: {[event.type for event in events]}")

    def of_kind(self, events, kind):
        return [strict(event) for event in events if event.type == kind]

    def test_a_second_message_reads_the_file_that_the_first_one_wrote(self):
        session = self.session()
        first = self.say(session, "SDK: write a file")
        kinds = [event.type for event in first]
        self.assertEqual(kinds[0], "user.message")
        self.assertIn("session.status_running", kinds)
        self.assertIn("agent.thinking", kinds)
        (use,) = self.of_kind(first, "agent.tool_use")
        (result,) = self.of_kind(first, "agent.tool_result")
        self.assertEqual((use.name, result.tool_use_id, bool(result.is_error)), ("write", use.id, False))
        self.assertEqual([text_of(m) for m in self.of_kind(first, "agent.message")][-1], "The file is written.")
        (idle,) = self.of_kind(first, "session.status_idle")
        self.assertEqual(idle.stop_reason.type, "end_turn")

        second = self.say(session, "SDK: read the file")
        (use,) = self.of_kind(second, "agent.tool_use")
        (result,) = self.of_kind(second, "agent.tool_result")
        self.assertEqual((use.name, result.tool_use_id, bool(result.is_error)), ("read", use.id, False))
        self.assertIn("written by the first message", text_of(result))

        # What was streamed is what is listed, in the same order; nothing came twice.
        listed = [event.id for event in self.beta.sessions.events.list(session.id, limit=5)]
        streamed = [event.id for event in first + second]
        self.assertEqual(len(listed), len(set(listed)))
        self.assertEqual([event for event in listed if event in set(streamed)], streamed)
        uses = self.beta.sessions.events.list(session.id, types=["agent.tool_use"], order="desc")
        self.assertEqual([event.name for event in uses], ["read", "write"])

        now = strict(self.beta.sessions.retrieve(session.id))
        self.assertEqual(now.status, "idle")
        self.assertGreater(now.usage.input_tokens, 0)
        self.assertGreater(now.usage.output_tokens, 0)

    def test_an_interrupt_ends_the_running_call_and_the_session_goes_on(self):
        session = self.session()
        with self.beta.sessions.events.stream(session.id) as stream:
            self.say(session, "SDK: wait for long", until="agent.tool_use", stream=stream)
            self.beta.sessions.events.send(session.id, events=[{"type": "user.interrupt"}])
            ended = self.events_until(stream, "session.status_idle")
        self.assertEqual(len(self.of_kind(ended, "agent.tool_result")), 1)
        self.assertTrue(self.of_kind(ended, "agent.tool_result")[0].is_error)
        self.assertEqual(len(self.of_kind(ended, "user.interrupt")), 1)

        after = self.say(session, "SDK: after the interrupt")
        (result,) = self.of_kind(after, "agent.tool_result")
        self.assertIn("still here", text_of(result))
        self.assertEqual([text_of(m) for m in self.of_kind(after, "agent.message")][-1], "The session goes on.")

    def test_calls_of_one_answer_run_side_by_side_and_a_failing_one_says_so(self):
        events = self.say(self.session(), "SDK: parallel calls")
        uses = self.of_kind(events, "agent.tool_use")
        results = {result.tool_use_id: text_of(result) for result in self.of_kind(events, "agent.tool_result")}
        self.assertEqual(set(results), {use.id for use in uses})
        self.assertIn("left", results[uses[0].id])
        self.assertIn("right", results[uses[1].id])
        last_use = max(i for i, event in enumerate(events) if event.type == "agent.tool_use")
        first_result = min(i for i, event in enumerate(events) if event.type == "agent.tool_result")
        self.assertLess(last_use, first_result)

    def test_a_session_may_begin_with_a_message_and_ends_archived_and_deleted(self):
        session = self.session(initial_events=[message("SDK: talk")])
        listed = []
        while "session.status_idle" not in [event.type for event in listed]:
            listed = list(self.beta.sessions.events.list(session.id))
        self.assertEqual([text_of(m) for m in self.of_kind(listed, "agent.message")], ["Only words."])
        archived = self.beta.sessions.archive(session.id)
        self.assertIsNotNone(archived.archived_at)
        with self.assertRaises(anthropic.ConflictError):
            self.beta.sessions.events.send(session.id, events=[message("too late")])
        self.assertEqual(self.beta.sessions.delete(session.id).type, "session_deleted")
        with self.assertRaises(anthropic.NotFoundError):
            self.beta.sessions.retrieve(session.id)

    def test_agents_are_versioned_listed_in_pages_and_archived(self):
        name = f"sdk-python-{uuid.uuid4()}"
        made = [self.beta.agents.create(name=f"{name}-{n}", model="scripted") for n in range(3)]
        changed = strict(self.beta.agents.update(made[0].id, version=1, system="Other."))
        self.assertEqual((changed.version, changed.name), (2, f"{name}-0"))
        with self.assertRaises(anthropic.ConflictError):
            self.beta.agents.update(made[0].id, version=1, system="Stale.")
        versions = [agent.version for agent in self.beta.agents.versions.list(made[0].id, limit=1)]
        self.assertEqual(versions, [2, 1])
        listed = [agent.id for agent in self.beta.agents.list(limit=2) if agent.name.startswith(name)]
        self.assertEqual(listed, [agent.id for agent in reversed(made)])
        self.assertIsNotNone(self.beta.agents.archive(made[0].id).archived_at)

    def test_errors_arrive_as_the_sdks_own(self):
        with self.assertRaises(anthropic.BadRequestError) as refused:
            self.beta.agents.create(name="a", model="m", tools=[{"type": "mcp_toolset", "mcp_server_name": "x"}])
        self.assertIn("tools[0].type", str(refused.exception))
        with self.assertRaises(anthropic.NotFoundError):
            self.beta.sessions.retrieve("sesn_" + "0" * 32)
        stranger = anthropic.Anthropic(base_url=URL, api_key="covey_wrong", max_retries=0)
        with self.assertRaises(anthropic.AuthenticationError):
            list(stranger.beta.agents.list())
        stranger.close()


if __name__ == "__main__":
    unittest.main()
