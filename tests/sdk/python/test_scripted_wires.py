"""The official `openai` SDK as judge of the scripted model's other two wires: Chat Completions and Responses.

COVEY_MODEL_URL names a scripted model that serves ../script.json (see ../README.md).
"""

import json
import os
import unittest
import urllib.request

import openai

URL = os.environ["COVEY_MODEL_URL"]
NOTE = "written by the first message\n"
THINKING = "A file that stays: ä € 🦊"


def strict(thing):
    """The SDK builds its types without looking; this looks, at everything that was sent."""
    # The warnings are about its own parsed types, which it does not know by their parents.
    type(thing).model_validate(thing.to_dict(mode="json", warnings=False))
    return thing


class Wires(unittest.TestCase):
    def setUp(self):
        self.client = openai.OpenAI(base_url=f"{URL}/v1", api_key="any", max_retries=0, timeout=60)

    def tearDown(self):
        self.client.close()

    def violations(self):
        with urllib.request.urlopen(f"{URL}/violations") as answer:
            return json.load(answer)["refused"]


class Chat(Wires):
    def stream(self, messages):
        """The answer put together by the SDK, and every chunk of it."""
        chunks = []
        with self.client.chat.completions.stream(
            model="scripted", messages=messages, stream_options={"include_usage": True}
        ) as stream:
            for event in stream:
                if event.type == "chunk":
                    chunks.append(strict(event.chunk))
            return stream.get_final_completion(), chunks

    def test_a_stream_is_parsed_into_the_answer_that_is_also_given_whole(self):
        messages = [{"role": "system", "content": "A test."}, {"role": "user", "content": "SDK: write"}]
        streamed, chunks = self.stream(messages)
        whole = strict(self.client.chat.completions.create(model="scripted", messages=messages))
        for completion in (streamed, whole):
            (choice,) = completion.choices
            self.assertEqual((choice.finish_reason, choice.message.content), ("tool_calls", "I write the file."))
            (call,) = choice.message.tool_calls
            self.assertEqual(call.function.name, "write")
            self.assertEqual(json.loads(call.function.arguments)["content"], NOTE)
        self.assertEqual(streamed.choices[0].message.tool_calls[0].id, whole.choices[0].message.tool_calls[0].id)
        self.assertEqual(streamed.usage, whole.usage)
        self.assertGreater(streamed.usage.completion_tokens, 0)
        self.assertEqual(whole.choices[0].message.model_extra["reasoning_content"], THINKING)
        thought = [c.delta.model_extra.get("reasoning_content", "") for chunk in chunks for c in chunk.choices]
        self.assertEqual("".join(thought), THINKING)

    def test_parallel_calls_are_streamed_by_index_and_a_conversation_is_played_to_its_end(self):
        before = self.violations()
        messages, rounds = [{"role": "user", "content": "SDK: parallel"}], 0
        while True:
            completion, _ = self.stream(messages)
            (choice,) = completion.choices
            messages.append(choice.message.to_dict(mode="json", warnings=False))
            if choice.finish_reason == "stop":
                break
            calls = choice.message.tool_calls
            commands = [json.loads(call.function.arguments)["command"] for call in calls]
            self.assertEqual(commands, ["echo left", "echo right >&2; exit 3"])
            messages += [{"role": "tool", "tool_call_id": call.id, "content": "ok"} for call in calls]
            rounds += 1
        self.assertEqual((rounds, choice.message.content), (1, "Both have ended."))
        self.assertEqual(self.violations() - before, 0)

    def test_a_call_without_its_result_is_refused_as_the_service_would(self):
        call = {"id": "call_1", "type": "function", "function": {"name": "bash", "arguments": "{}"}}
        messages = [
            {"role": "user", "content": "SDK: talk"},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "user", "content": "and now?"},
        ]
        before = self.violations()
        with self.assertRaises(openai.BadRequestError) as refused:
            self.client.chat.completions.create(model="scripted", messages=messages)
        self.assertIn("call_1", str(refused.exception))
        self.assertEqual(self.violations() - before, 1)


class Responses(Wires):
    def stream(self, items):
        """The answer put together by the SDK, and every event of it."""
        events = []
        with self.client.responses.stream(model="scripted", input=items, instructions="A test.") as stream:
            for event in stream:
                events.append(strict(event))
            return stream.get_final_response(), events

    def test_a_stream_is_parsed_into_the_answer_that_is_also_given_whole(self):
        items = [{"role": "user", "content": "SDK: write"}]
        streamed, events = self.stream(items)
        whole = strict(self.client.responses.create(model="scripted", input=items, instructions="A test."))
        plain = lambda response: [item.to_dict(mode="json", exclude_none=True, warnings=False) for item in response.output]
        self.assertEqual(plain(streamed), plain(whole))
        self.assertEqual(streamed.usage, whole.usage)
        self.assertEqual((streamed.output_text, streamed.status), ("I write the file.", "completed"))
        reasoning, message, call = streamed.output
        self.assertEqual((reasoning.type, message.type, call.type), ("reasoning", "message", "function_call"))
        self.assertEqual(reasoning.summary[0].text, THINKING)
        self.assertTrue(reasoning.encrypted_content)
        self.assertEqual(json.loads(call.arguments)["content"], NOTE)
        kinds = [event.type for event in events]
        self.assertEqual((kinds[0], kinds[-1]), ("response.created", "response.completed"))
        self.assertIn("response.function_call_arguments.delta", kinds)
        numbers = [event.sequence_number for event in events]
        self.assertEqual(numbers, list(range(len(numbers))))

    def test_a_conversation_is_played_to_its_end_with_its_reasoning_sent_back(self):
        before = self.violations()
        items = [{"role": "user", "content": "SDK: write"}]
        while True:
            response, _ = self.stream(items)
            items += [item.to_dict(mode="json", exclude_none=True, warnings=False) for item in response.output]
            calls = [item for item in response.output if item.type == "function_call"]
            if not calls:
                break
            items += [{"type": "function_call_output", "call_id": call.call_id, "output": "ok"} for call in calls]
        self.assertEqual(response.output_text, "The file is written.")
        self.assertEqual(self.violations() - before, 0)

        changed = json.loads(json.dumps(items[:5]))
        changed[1]["encrypted_content"] = "forged"
        with self.assertRaises(openai.BadRequestError) as refused:
            self.client.responses.create(model="scripted", input=changed)
        self.assertIn("signature", str(refused.exception))
        self.assertEqual(self.violations() - before, 1)


if __name__ == "__main__":
    unittest.main()
