// The official TypeScript SDK drives a session of Covey, with nothing changed but base URL and key.
//
// COVEY_URL and COVEY_TOKEN name a server whose model is the scripted one with ../script.json (see ../README.md).

import assert from 'node:assert/strict';
import { randomUUID } from 'node:crypto';
import { test } from 'node:test';

import Anthropic from '@anthropic-ai/sdk';

const { COVEY_URL: baseURL, COVEY_TOKEN: apiKey } = process.env;
assert.ok(baseURL && apiKey, 'COVEY_URL and COVEY_TOKEN are not set');
// A session that is stuck shall fail the test, not hold it.
const options = { timeout: 120_000 };

const { beta } = new Anthropic({ baseURL, apiKey });

const message = (text) => ({ type: 'user.message', content: [{ type: 'text', text }] });
const textOf = (event) =>
  (event.content ?? []).filter((block) => block.type === 'text').map((block) => block.text).join('');
const ofKind = (events, kind) => events.filter((event) => event.type === kind);

async function newSession() {
  const name = `sdk-typescript-${randomUUID()}`;
  const agent = await beta.agents.create({
    name,
    model: 'scripted',
    tools: [{ type: 'agent_toolset_20260401' }],
  });
  const environment = await beta.environments.create({ name, config: { type: 'self_hosted' } });
  const session = await beta.sessions.create({ agent: agent.id, environment_id: environment.id, title: name });
  assert.equal(session.status, 'idle');
  assert.equal(session.agent.id, agent.id);
  return session;
}

async function until(stream, kind) {
  const events = [];
  for (;;) {
    const { value: event, done } = await stream.next();
    assert.ok(!done, `the stream ended before ${kind}: ${events.map((e) => e.type)}`);
    events.push(event);
    if (event.type === kind) return events;
  }
}

async function opened(session) {
  const stream = await beta.sessions.events.stream(session.id);
  return { events: stream[Symbol.asyncIterator](), close: () => stream.controller.abort() };
}

async function say(session, text) {
  const stream = await opened(session);
  try {
    await beta.sessions.events.send(session.id, { events: [message(text)] });
    return await until(stream.events, 'session.status_idle');
  } finally {
    stream.close();
  }
}

test('a second message reads the file that the first one wrote', options, async () => {
  const session = await newSession();
  const first = await say(session, 'SDK: write a file');
  const [use] = ofKind(first, 'agent.tool_use');
  const [result] = ofKind(first, 'agent.tool_result');
  assert.equal(use.name, 'write');
  assert.equal(result.tool_use_id, use.id);
  assert.ok(!result.is_error, textOf(result));
  assert.equal(ofKind(first, 'session.status_idle')[0].stop_reason.type, 'end_turn');

  const second = await say(session, 'SDK: read the file');
  assert.equal(ofKind(second, 'agent.tool_use')[0].name, 'read');
  assert.match(textOf(ofKind(second, 'agent.tool_result')[0]), /written by the first message/);
  assert.equal(textOf(ofKind(second, 'agent.message').at(-1)), 'The file is still there.');

  const listed = [];
  for await (const event of beta.sessions.events.list(session.id, { limit: 5 })) listed.push(event.id);
  const streamed = [...first, ...second].map((event) => event.id);
  assert.deepEqual(listed.filter((id) => streamed.includes(id)), streamed);
  assert.equal(new Set(listed).size, listed.length);
  assert.equal((await beta.sessions.retrieve(session.id)).status, 'idle');
});

test('an interrupt ends the running call and the session goes on', options, async () => {
  const session = await newSession();
  const stream = await opened(session);
  await beta.sessions.events.send(session.id, { events: [message('SDK: wait for long')] });
  await until(stream.events, 'agent.tool_use');
  await beta.sessions.events.send(session.id, { events: [{ type: 'user.interrupt' }] });
  const ended = await until(stream.events, 'session.status_idle');
  stream.close();
  assert.deepEqual(ofKind(ended, 'agent.tool_result').map((event) => event.is_error), [true]);

  const after = await say(session, 'SDK: after the interrupt');
  assert.match(textOf(ofKind(after, 'agent.tool_result')[0]), /still here/);
});

test('errors arrive as the SDK’s own', options, async () => {
  await assert.rejects(beta.sessions.retrieve(`sesn_${'0'.repeat(32)}`), Anthropic.NotFoundError);
  const stranger = new Anthropic({ baseURL, apiKey: 'covey_wrong', maxRetries: 0 });
  await assert.rejects(stranger.beta.agents.list(), Anthropic.AuthenticationError);
  const refused = await beta.sessions.create({ agent: 'x', environment_id: 'y' }).catch((error) => error);
  assert.ok(refused instanceof Anthropic.BadRequestError);
  assert.match(refused.message, /`agent`/);
});
