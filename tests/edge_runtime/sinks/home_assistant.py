"""Home Assistant's own MQTT integration beside a broker; run by the Python of an environment that has it.

Usage: PYTHON home_assistant.py PORT COUNT. It discovers so many entities within a minute, switches all switches
off, sets all numbers to 0.5, and prints as JSON {entity id: [state, attributes]}.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import asyncio
import json
import socket
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from homeassistant import auth, bootstrap, config_entries, core, loader
from homeassistant.helpers import entity_registry, frame
from homeassistant.setup import async_setup_component

TIMEOUT_S, SETTLE_S = 60.0, 2.0
ENTRY = {
    "created_at": "2026-01-01T00:00:00+00:00", "modified_at": "2026-01-01T00:00:00+00:00", "disabled_by": None,
    "discovery_keys": {}, "domain": "mqtt", "entry_id": "0123456789ABCDEF0123456789", "version": 1,
    "minor_version": 2, "options": {"discovery": True}, "pref_disable_new_entities": False,
    "pref_disable_polling": False, "source": "user", "subentries": [], "title": "a broker", "unique_id": None,
}  # fmt: skip


async def start(folder: Path, port: int) -> core.HomeAssistant:
    """A Home Assistant with nothing but its integration `mqtt`."""
    entry = {**ENTRY, "data": {"broker": "127.0.0.1", "port": port}}
    document = {"version": 1, "minor_version": 5, "key": "core.config_entries", "data": {"entries": [entry]}}
    (folder / "configuration.yaml").touch()
    (folder / ".storage").mkdir()
    (folder / ".storage" / "core.config_entries").write_text(json.dumps(document))
    hass = core.HomeAssistant(str(folder))
    hass.config.skip_pip = True
    frame.async_setup(hass)
    loader.async_setup(hass)
    hass.config_entries = config_entries.ConfigEntries(hass, {})
    await bootstrap.async_load_base_functionality(hass)
    hass.auth = await auth.auth_manager_from_config(hass, [{"type": "homeassistant"}], [])
    with socket.create_server(("127.0.0.1", 0)) as free:
        server = {"server_host": "127.0.0.1", "server_port": free.getsockname()[1]}
    assert await async_setup_component(hass, "http", {"http": server})
    assert await async_setup_component(hass, "mqtt", {})
    await hass.async_start()
    return hass


async def main(port: int, count: int) -> None:
    """Discover, order and print."""
    with tempfile.TemporaryDirectory() as folder:
        hass = await start(Path(folder), port)
        ends = time.monotonic() + TIMEOUT_S
        entities = entity_registry.async_get(hass).entities
        while len(entities) < count and time.monotonic() < ends:
            await asyncio.sleep(0.2)
        await asyncio.sleep(SETTLE_S)
        for domain, service, keys in (("switch", "turn_off", {}), ("number", "set_value", {"value": 0.5})):
            for name in hass.states.async_entity_ids(domain):
                await hass.services.async_call(domain, service, {"entity_id": name, **keys}, blocking=True)
        await asyncio.sleep(SETTLE_S)
        states: dict[str, Any] = {
            state.entity_id: [state.state, dict(state.attributes)]
            for state in map(hass.states.get, entities) if state is not None
        }  # fmt: skip
        print(json.dumps(states, default=str), flush=True)
        await hass.async_stop(force=True)


if __name__ == "__main__":
    asyncio.run(main(*map(int, sys.argv[1:])))
