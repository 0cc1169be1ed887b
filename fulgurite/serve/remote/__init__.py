"""An engine apart from its callers: requests and token updates as msgpack frames on a socket.

    EngineClient (asyncio) ══ frames on a socketpair ══▶ EngineLoop ─▶ Engine.step()

messages.py       what travels: msgspec Structs
channel.py        frames on a socket
engine_interface.py  what a loop drives
served_engine.py  an `LLM` as such an engine; mock.py: one without a model
engine_loop.py    commands in, steps, updates out; one message for all updates of a flush
engine_main.py    the process of an engine
client.py         the asyncio side: streams of updates, health, restarts

The loop runs in a process of its own, or in a thread: the frames are the same.
"""
