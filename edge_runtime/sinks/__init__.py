"""Sinks: where results go (JSON lines, MQTT, webhooks), each with a worker thread and a bounded outbox."""
