"""The official SDK as judge of the scripted model: what it streams is what the Messages API streams.

COVEY_MODEL_URL names a scripted model that serves ../script.json (see ../README.md).
"""

import json
import os
import unittest
import urllib.request

import anthropic

URL = os.environ["COVEY_MODEL_URL"]
REQUEST = {"model": "scripted", "max_tokens": 1000, "system": "A test."}


class ScriptedModel(unittest.TestCase):
    def setUp(self):
        self.client = anthropic.Anthropic(base_url=URL, api_key="any", max_retries=0, timeout=60)

    def tearDown(self):
        self.client.close()

    def violations(self):
        with urllib.request.urlopen(f"{URL}/violations") as answer:
            return json.load(answer)["refused"]

    def test_a_stream_is_parsed_into_the_message_that_is_also_answered_whole(self):
        messages = [{"role": "user", "content": "SDK: write"}]
        with self.client.messages.stream(messages=messages, **REQUEST) as stream:
            text = "".join(stream.text_stream)
            streamed = stream.get_final_message()
        whole = self.client.messages.create(messages=messages, **REQUEST)
        plain = lambda message: json.loads(message.to_json(exclude_none=True))["content"]
        self.assertEqual(plain(streamed), plain(whole))
        self.assertEqual(streamed.usage, whole.usage)
        self.assertEqual(text, "I write the file.")
        thinking, said, call = streamed.content
        self.assertEqual((thinking.type, said.type, call.type), ("thinking", "text", "tool_use"))
        self.assertEqual(thinking.thinking, "A file that stays: ä € 🦊")
        self.assertEqual(call.input["content"], "written by the first message\n")
        self.assertEqual(streamed.stop_reason, "tool_use")
        for message in (streamed, whole):
            type(message).model_validate(message.to_dict(mode="json"))

    def test_a_conversation_is_played_to_its_end_and_nothing_is_refused(self):
        before = self.violations()
        messages, said = [{"role": "user", "content": "SDK: parallel"}], []
        while True:
            with self.client.messages.stream(messages=messages, **REQUEST) as stream:
                answer = stream.get_final_message()
            messages.append({"role": "assistant", "content": answer.to_dict()["content"]})
            if answer.stop_reason == "end_turn":
                said.append(answer.content[0].text)
                break
            calls = [block for block in answer.content if block.type == "tool_use"]
            self.assertEqual(len(calls), 2)
            results = [{"type": "tool_result", "tool_use_id": call.id, "content": "ok"} for call in calls]
            messages.append({"role": "user", "content": results})
        self.assertEqual(said, ["Both have ended."])
        self.assertEqual(self.violations() - before, 0)

    def test_a_request_with_an_orphaned_call_is_refused_as_the_service_would(self):
        call = {"type": "tool_use", "id": "toolu_1", "name": "bash", "input": {}}
        messages = [
            {"role": "user", "content": "SDK: talk"},
            {"role": "assistant", "content": [call]},
            {"role": "user", "content": "and now?"},
        ]
        before = self.violations()
        with self.assertRaises(anthropic.BadRequestError) as refused:
            self.client.messages.create(messages=messages, **REQUEST)
        self.assertIn("toolu_1", str(refused.exception))
        self.assertEqual(self.violations() - before, 1)


if __name__ == "__main__":
    unittest.main()
