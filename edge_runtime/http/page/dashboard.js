"use strict";
// One WebSocket brings the status every second (text) and each camera's newest picture (bytes: the length of a JSON
// head, the head, a JPEG). Text from the box is only ever set as text.

const part = (id) => document.getElementById(id);
const make = (name, text = "", className = "") => {
  const made = document.createElement(name);
  made.textContent = text;
  if (className) made.className = className;
  return made;
};
const mebibytes = (bytes) => (bytes / 2 ** 20).toFixed(bytes < 1e7 ? 1 : 0) + " MiB";
const plural = (count, one, many = one + "s") => `${count} ${count === 1 ? one : many}`;
const percent = (share) => (100 * share).toFixed(share > 0 && share < 0.1 ? 1 : 0) + " %";
const SILENT_S = 4; // a box that says nothing for so long is greyed: its status comes every second
const STALE_S = 10; // a picture older than this is greyed
const seconds = (value) => {
  if (value === null) return "–";
  if (value < 1) return Math.round(value * 1000) + " ms";
  if (value < 90) return value.toFixed(1) + " s";
  return value < 5400 ? Math.round(value / 60) + " min" : (value / 3600).toFixed(1) + " h";
};
const clockTime = (date) => date.toLocaleTimeString([], { hourCycle: "h23" });
const dayTime = (unixS) => new Date(unixS * 1000).toLocaleString([], { hourCycle: "h23" });
const counts = (byReason) => Object.entries(byReason).map(([reason, count]) => `${reason} ${count}`).join(", ") || "–";
const cameras = new Map();
let ahead = 0; // seconds that this browser's clock is ahead of the box's
const now = () => Date.now() / 1000 - ahead;

function cameraCard(id) {
  if (cameras.has(id)) return cameras.get(id);
  const card = make("figure", "", "camera");
  const view = make("button", "", "view"), none = make("span", "no frame yet");
  const image = make("img");
  image.alt = `newest frame of ${id}`;
  image.hidden = true;
  const mark = make("span", "", "mark");
  mark.hidden = true;
  view.append(none, image, mark);
  view.title = "larger or smaller";
  view.setAttribute("aria-pressed", "false");
  view.onclick = () => view.setAttribute("aria-pressed", String(card.classList.toggle("large")));
  const caption = make("figcaption");
  const name = make("b", id), note = make("span");
  const plain = make("a", "plain picture");
  plain.href = `/api/cameras/${encodeURIComponent(id)}/frame.jpg?plain=1`;
  plain.target = "_blank";
  const results = make("p", "", "results");
  caption.append(name, note);
  const link = make("p", "", "soft");
  link.append(plain);
  card.append(view, caption, results, link);
  part("cameras").append(card);
  const made = { card, none, image, mark, note, results, address: null, result: null };
  cameras.set(id, made);
  return made;
}

function showPicture(buffer) {
  const length = new DataView(buffer).getUint32(0);
  const head = JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, 4, length)));
  const card = cameraCard(head.camera);
  const before = card.address;
  card.address = URL.createObjectURL(new Blob([new Uint8Array(buffer, 4 + length)], { type: "image/jpeg" }));
  card.image.src = card.address;
  card.image.hidden = false;
  card.none.hidden = true;
  card.result = head.answered_at;
  ahead = Date.now() / 1000 - head.sent_at;
  if (before) URL.revokeObjectURL(before);
  card.results.replaceChildren(...head.results.map(({ query, text }) => {
    const line = make("span", `${query}: `);
    line.append(make("b", text));
    return line;
  }));
}

function showCameras(status) {
  const known = new Set(status.cameras.map((camera) => camera.id));
  for (const [id, card] of cameras) {
    if (known.has(id)) continue;
    card.card.remove();
    cameras.delete(id);
  }
  for (const camera of status.cameras) {
    const card = cameraCard(camera.id);
    const stale = camera.frame_age_s !== null && camera.frame_age_s > STALE_S && camera.state !== "ended";
    card.card.classList.toggle("down", !camera.up);
    card.card.classList.toggle("stale", camera.up && stale);
    card.mark.hidden = camera.up && !stale;
    card.mark.textContent = camera.up ? `${seconds(camera.frame_age_s)} old`
      : camera.state + (camera.away_s === null || camera.state === "ended" ? "" : ` for ${seconds(camera.away_s)}`);
    const own = status.queries.filter((query) => query.camera === camera.id);
    const isOff = own.length > 0 && own.every((query) => query.paused || query.scheduled === false);
    const age = isOff ? "off, by its hours or a person" : card.result === null ? "no result yet" : `result ${seconds(Math.max(0, now() - card.result))} old`;
    card.note.textContent = (camera.up ? `${camera.fps.toFixed(1)} fps · ` : "") + age +
      (camera.reconnects ? ` · came back ${camera.reconnects}×` : "") +
      (camera.undecodable ? ` · ${plural(camera.undecodable, "undecodable frame")}` : "");
  }
}

function rows(id, values) {
  const body = part(id);
  const names = [...body.parentElement.tHead.rows[0].cells].map((cell) => cell.textContent);
  body.replaceChildren(...values.map((cells) => {
    const row = make("tr");
    row.append(...cells.map(([content, className = ""], column) => {
      const cell = make("td", "", className);
      cell.append(content);
      cell.dataset.of = names[column];
      return cell;
    }));
    return row;
  }));
}

function showQueries(status) {
  rows("queries", status.queries.map((query) => {
    const late = query.age_p95_ms !== null && query.age_p95_ms > query.sla_ms;
    return [
      [query.id + (query.paused ? " (switched off)" : query.scheduled === false ? " (off now)" : "")], [query.camera], [query.resident ? "yes" : "no", query.resident ? "good" : "soft"],
      [mebibytes(query.bytes), "n"], [mebibytes(query.own_bytes), "n"],
      [`${query.fps.toFixed(1)} of ${query.asked_fps.toFixed(1)}`, "n"],
      [percent(query.dropped_share), query.dropped_share >= 0.1 ? "n bad" : "n"],
      [query.age_p95_ms === null ? "–" : seconds(query.age_p95_ms / 1000), late ? "n bad" : "n"],
      [seconds(query.sla_ms / 1000), "n"], [String(query.ledger.processed), "n"], [String(query.ledger.late), "n"],
      [String(query.ledger.failed), query.ledger.failed ? "n bad" : "n"], [counts(query.ledger.dropped)],
    ];
  }));
}

function showMemory(status) {
  const resident = status.queries.filter((query) => query.resident);
  const total = (key) => resident.reduce((sum, query) => sum + query[key], 0);
  const own = Math.min(status.resident_bytes, total("own_bytes")), shared = status.resident_bytes - own;
  const free = Math.max(0, status.budget_bytes - status.resident_bytes - status.workspace_bytes);
  const shares = [["shared", shared, "weights that queries share"], ["own", own, "weights of one query alone"],
    ["workspace", status.workspace_bytes, "workspace"], ["free", free, "free"]];
  part("budget").replaceChildren(...shares.slice(0, 3).map(([name, bytes]) => {
    const bar = make("i", "", name);
    bar.style.width = Math.min(100, (100 * bytes) / status.budget_bytes) + "%";
    return bar;
  }));
  part("budget").ariaLabel = shares.map(([, bytes, label]) => `${label} ${mebibytes(bytes)}`).join(", ");
  part("budget-legend").replaceChildren(...shares.map(([name, bytes, label]) => {
    const entry = make("span");
    entry.append(make("i", "", name), `${label} ${mebibytes(bytes)}`);
    return entry;
  }));
  part("budget-words").textContent =
    `Budget ${mebibytes(status.budget_bytes)}. ${resident.length} of ${plural(status.queries.length, "query", "queries")} resident` +
    (total("bytes") > status.resident_bytes ? `, unshared they would take ${mebibytes(total("bytes"))}` : "") +
    `. ${mebibytes(status.bytes_moved)} copied so far.` +
    (status.beside_budget_bytes === null ? "" : ` Beside the weights the process takes ${mebibytes(status.beside_budget_bytes)}.`);
}

const because = (reason) => (reason ? ` (${reason})` : "");

function showTroubles(status) {
  const problems = [
    ...(status.overloaded ? [`overloaded: ${percent(status.dropped_share)} of the frames of the last minute were dropped`] : []),
    ...(status.tls && status.tls.warning ? [status.tls.warning] : []),
    ...status.cameras.filter((one) => !one.up || one.error).map((one) => `camera ${one.id}: ${one.state}` +
      (one.up || one.frame_age_s === null ? "" : `, newest frame ${seconds(one.frame_age_s)} old`) + because(one.error)),
    ...status.sinks.filter((one) => !["up", "starting"].includes(one.state))
      .map((one) => `sink ${one.id}: ${one.state}${because(one.trouble)}`),
    ...status.queries.filter((one) => one.tracking_trouble).map((one) => `query ${one.id}: ${one.tracking_trouble}`),
    ...(status.clips && status.clips.trouble ? [`clips: ${status.clips.trouble}`] : []),
    ...status.queries.filter((one) => one.failure).map((one) => `query ${one.id}: ${one.failure}`),
    ...(status.bundle_fault ? [`bundle: ${status.bundle_fault}`] : []),
    ...Object.entries(status.held_back).map(([query, why]) => `query ${query} keeps its old weights: ${why}`),
    ...(status.refused ? [`the last reload was not applied: ${status.refused}`] : []),
    ...(status.updates && status.updates.trouble ? [`updates: ${status.updates.trouble}`] : []),
    ...(status.updates && status.updates.why && status.updates.why !== status.updates.trouble
      ? [`update ${status.updates.offered || ""} refused since ${dayTime(status.updates.since)}: ${status.updates.why}`] : []),
  ];
  part("troubles").hidden = !problems.length;
  part("troubles").replaceChildren(...problems.map((text) => make("li", text)));
  const state = part("state");
  const word = status.overloaded ? "overloaded" : `${problems.length} to look at`;
  state.textContent = problems.length ? word + (status.overloaded && problems.length > 1 ? ` · ${problems.length - 1} more` : "") : "all well";
  state.className = "state " + (problems.length ? "bad" : "good");
}

const VERDICTS = {
  kept: ["on target", "soft"], below: ["below its target", "bad"], unsure: ["below its target, perhaps by chance", "bad"],
  "too few": ["too few frames", "soft"],
};

function showDrift(status) {
  part("drift-part").hidden = !status.drift.length;
  part("no-drift").hidden = status.drift.length > 0;
  rows("drift", status.drift.map((one) => [
    [one.query], [one.ratio === null ? "–" : one.ratio.toFixed(3), "n"],
    [one.chance_per_year === null ? "–" : one.chance_per_year > 1000 ? "often" : `≤ ${Number(one.chance_per_year.toPrecision(2))}`, "n"],
    [String(one.frames), "n"],
    one.reverted ? ["its own weights again", "bad"] : VERDICTS[one.verdict],
    [dayTime(one.checked_at)],
  ]));
  const spool = status.spool;
  const lost = spool && Object.keys(spool.unsampled).length ? ` · not kept: ${counts(spool.unsampled)}` : "";
  part("spool").textContent =
    spool ? `${mebibytes(spool.bytes)} of frames kept for the next check, ${plural(spool.samples, "frame")} since the start${lost}` : "";
}

const thumbnails = new Map(); // by event, so that a row of the next second has the same picture

function thumbnail(one) {
  const key = `${one.id} ${one.end_time}`; // its snapshot may be another one at the end
  if (!thumbnails.has(key)) {
    const image = make("img", "", "thumbnail");
    image.alt = `${one.label} of ${one.event}`;
    image.src = `/api/events/${encodeURIComponent(one.id)}/snapshot.jpg?${one.end_time === null ? "new" : "end"}`;
    thumbnails.set(key, image);
  }
  return thumbnails.get(key);
}

let allEvents = []; // the newest 200, while a filter asks for them
let newest = null;

function eventLinks(one) {
  const links = make("span");
  const add = (text, file) => {
    const link = make("a", text);
    link.href = `/api/events/${encodeURIComponent(one.id)}/${file}`;
    link.target = "_blank";
    links.append(link, " ");
  };
  if (one.end_time !== null && one.has_clip) add("clip", "clip.mp4");
  return links;
}

function findEvents(events) {
  const words = part("filter").value.toLowerCase().split(/\s+/).filter(Boolean);
  const text = (one) => `${one.event} ${one.query} ${one.camera} ${one.label} #${one.track}`.toLowerCase();
  return words.length ? allEvents.filter((one) => words.every((word) => text(one).includes(word))) : events;
}

async function loadEvents() {
  if (!part("filter").value.trim()) return;
  try {
    const answer = await fetch("/api/events");
    if (answer.ok) allEvents = (await answer.json()).events;
  } catch { /* the socket says when the box is away */ }
  if (newest) showEvents(newest);
}

function showEvents(status) {
  const events = findEvents(status.events);
  part("events-part").hidden = !Object.keys(status.events_begun).length && !status.events.length;
  const shown = new Set(events.map((one) => `${one.id} ${one.end_time}`));
  for (const key of thumbnails.keys()) if (!shown.has(key)) thumbnails.delete(key);
  rows("events", events.map((one) => [
    [one.has_snapshot ? thumbnail(one) : "", "picture"], [one.event + (one.direction ? ` to the ${one.direction}` : "")], [one.query], [one.track === null ? one.label : `${one.label} #${one.track}`],
    [clockTime(new Date(one.start_time * 1000))],
    [one.end_time === one.start_time ? "–" : seconds(Math.max(0, (one.end_time === null ? now() : one.end_time) - one.start_time)), "n"],
    one.end_time === null ? ["goes on", "good"] : [one.end_reason, "soft"], [eventLinks(one)],
  ]));
}

function showUpdates(updates) {
  part("updates").textContent = !updates ? "" : [
    `Updates: ${updates.state}`,
    ...(updates.why ? [`${updates.offered || "the offer"}, since ${dayTime(updates.since)}: ${updates.why}`] : []),
    updates.checked_at === null ? "the server has not answered yet" : `the server answered ${dayTime(updates.checked_at)}`,
  ].join(" · ");
}

function showStatus(status) {
  newest = status;
  part("as-of").textContent = `as of ${clockTime(new Date())}`;
  document.title = `${status.name} · Gemel`;
  part("box").textContent = status.name;
  part("what").textContent =
    `workload ${status.workload} · bundle ${status.bundle} · run ${status.run} · policy ${status.policy} on ${status.device} · up ${seconds(status.uptime_s)}` +
    (status.version ? ` · Gemel ${status.version}` : "");
  showTroubles(status);
  showCameras(status);
  showMemory(status);
  showQueries(status);
  rows("sinks", status.sinks.map((sink) => [
    [sink.id], [sink.state, sink.state === "down" ? "bad" : ""], [String(sink.delivered), "n"], [String(sink.queued), "n"],
    [counts(sink.undelivered), Object.keys(sink.undelivered).length ? "bad" : "soft"],
  ]));
  showEvents(status);
  showDrift(status);
  showUpdates(status.updates);
}

const curves = {};

function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

function drawCurve(id, at, ...lines) {
  const width = part(id).clientWidth;
  if (!width) return; // it is folded
  if (curves[id]) curves[id].destroy();
  const brief = at.length < 60; // seconds matter
  const clock = { hour: "2-digit", minute: "2-digit", second: brief ? "2-digit" : undefined, hourCycle: "h23" };
  const times = (_, splits) => splits.map((one) => new Date(one * 1000).toLocaleTimeString([], clock));
  const axis = { stroke: colour("--soft"), grid: { stroke: colour("--line"), width: 1 }, ticks: { show: false } };
  curves[id] = new uPlot({
    width, height: 170, legend: { show: false }, cursor: { drag: { x: false, y: false } },
    scales: { y: { range: (_, low, high) => [0, Math.max(high || 0, 1) * 1.1] } },
    series: [{}, ...lines.map((_, index) => (
      { stroke: colour(["--main", "--second"][index]), width: 2, points: { show: at.length < 3 } }))],
    axes: [{ ...axis, values: times, space: brief ? 80 : 60, size: 30 }, { ...axis, size: 54 }],
  }, [at, ...lines], part(id));
}

async function showHour() {
  try {
    const answer = await fetch("/api/history");
    if (answer.status === 401) location.reload(); // the session has ended: the page asks for the token
    if (!answer.ok) return;
    const hour = await answer.json();
    drawCurve("rate-curve", hour.at, hour.asked_fps, hour.fps);
    drawCurve("dropped-curve", hour.at, hour.dropped_share.map((share) => 100 * share));
    drawCurve("memory-curve", hour.at, hour.resident_bytes.map((bytes) => bytes / 2 ** 20));
    drawCurve("age-curve", hour.at, hour.age_p95_ms);
  } catch { /* the socket says when the box is away */ }
}

let patience = 500;
let socket = null;
let heardAt = Date.now();

function checkSilence(isClosed) {
  const isSilent = isClosed || Date.now() - heardAt > 1000 * SILENT_S;
  if (isSilent) {
    part("state").textContent = `the box says nothing since ${clockTime(new Date(heardAt))}`;
    part("state").className = "state bad";
  }
  document.body.classList.toggle("silent", isSilent);
}

function watch() {
  const labels = part("labels").checked ? "" : "?plain=1";
  socket = new WebSocket(`${location.protocol === "https:" ? "wss" : "ws"}://${location.host}/api/watch${labels}`);
  socket.binaryType = "arraybuffer";
  socket.onmessage = (event) => {
    patience = 500;
    heardAt = Date.now();
    document.body.classList.remove("silent");
    if (typeof event.data === "string") showStatus(JSON.parse(event.data));
    else showPicture(event.data);
  };
  socket.onclose = () => {
    checkSilence(true);
    setTimeout(watch, patience);
    patience = Math.min(10000, patience * 2);
  };
}

const sections = [...document.querySelectorAll("details")];
if (matchMedia("(max-width: 900px)").matches) sections.slice(1).forEach((one) => { one.open = false; });
sections.forEach((one) => { one.ontoggle = showHour; });
part("labels").onchange = () => { // the next socket brings the other pictures
  socket.onclose = null;
  socket.close();
  watch();
};
part("filter").oninput = loadEvents;

watch();
showHour();
setInterval(loadEvents, 5000);
setInterval(showHour, 10000);
setInterval(() => checkSilence(document.body.classList.contains("silent")), 500);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", showHour);
addEventListener("resize", showHour);
