// The dashboard of lvsd. Everything that comes from lvsd is put into the page as text, never as markup.
"use strict";
(() => {
  const EVERY = 1000; // ms between two questions while the page is seen
  const HISTORY_EVERY = 15000;
  const $ = (id) => document.getElementById(id);
  const may = { token: sessionStorage.getItem("token") || "", change: false, why: "" };
  const open = new Map(); // services that are unfolded: name -> details as last told
  let overview = null;
  let lastEvent = 0;
  let countedFrom = 0;
  let historyDue = 0;
  const events = [];
  const charts = {};

  // An element with text or children; a class; attributes.
  function make(name, content, cls, attributes) {
    const element = document.createElement(name);
    if (cls) element.className = cls;
    for (const [key, value] of Object.entries(attributes || {})) element.setAttribute(key, value);
    for (const child of [content].flat()) if (child !== null && child !== undefined) element.append(child);
    return element;
  }

  // Makes a node like a fresh one, and keeps what is the same: focus, a pressed button and a selection stay.
  function patch(old, fresh) {
    const element = old.nodeType === Node.ELEMENT_NODE;
    const same = old.nodeType === fresh.nodeType && (!element || (old.tagName === fresh.tagName && old.dataset.key === fresh.dataset.key));
    if (!same) return old.replaceWith(fresh);
    if (!element) {
      if (old.data !== fresh.data) old.data = fresh.data;
      return;
    }
    for (const { name, value } of fresh.attributes) if (old.getAttribute(name) !== value) old.setAttribute(name, value);
    if (!fresh.className && old.className) old.removeAttribute("class");
    fill(old, [...fresh.childNodes]);
  }

  // Puts children into an element.
  function fill(element, children) {
    const nodes = children.filter((child) => child !== null);
    const now = [...element.childNodes];
    if (now.length === nodes.length) return now.forEach((old, n) => patch(old, nodes[n]));
    const focus = element.contains(document.activeElement) ? document.activeElement.dataset.key : null;
    element.replaceChildren(...nodes);
    const again = focus && [...element.querySelectorAll("[data-key]")].find((one) => one.dataset.key === focus);
    if (again) again.focus();
  }

  const plural = (n, word) => `${n} ${word}${n === 1 ? "" : "s"}`;

  function lasted(seconds) {
    if (seconds === null || seconds === undefined) return "";
    const [d, h, m] = [Math.floor(seconds / 86400), Math.floor(seconds / 3600) % 24, Math.floor(seconds / 60) % 60];
    if (d) return `${d} d ${h} h`;
    if (h) return `${h} h ${m} min`;
    if (m) return `${m} min ${seconds % 60} s`;
    return `${seconds} s`;
  }

  function short(n) {
    for (const [unit, size] of [["T", 1e12], ["G", 1e9], ["M", 1e6], ["k", 1e3]])
      if (Math.abs(n) >= size) return `${(n / size).toFixed(n / size < 10 ? 1 : 0)} ${unit}`;
    return `${Math.round(n * 10) / 10}`;
  }

  // The time of day, as logs have it.
  const clock = (ms) => new Date(ms).toLocaleTimeString("en-GB");

  async function call(path, body) {
    const headers = {};
    if (may.token) headers.authorization = `Bearer ${may.token}`;
    const options = { headers, cache: "no-store", signal: AbortSignal.timeout(10000) };
    if (body !== undefined) {
      options.method = "POST";
      options.body = JSON.stringify(body);
      headers["content-type"] = "application/json";
    }
    const reply = await fetch(path, options);
    const told = await reply.json();
    if (!reply.ok) throw Object.assign(new Error(told.error.message), { status: reply.status });
    return told;
  }

  // ---- what is broken, first

  function alerts(o) {
    const all = [];
    if (!o.dataplane.connected && !o.dataplane.idle) all.push("No dataplane answers: packets of services reach nobody that lvsd knows of. The log of lvsd says why.");
    if (!o.loaded.ok && o.loaded.time) all.push(`The file was refused, the old configuration holds: ${o.loaded.message}`);
    for (const i of o.interfaces) if (!i.up) all.push(`Interface ${i.name} is down.`);
    for (const c of o.conflicts) all.push(`Another host (${c.mac}) answers for ${c.address}, too.`);
    for (const line of o.refused) all.push(`Refused by the dataplane: ${line}`);
    for (const line of o.drift) all.push(`Changed by hand: ${line}`);
    if (o.capacity && o.connections > o.capacity * 0.9) all.push(`The connection table is ${Math.round((100 * o.connections) / o.capacity)} % full; raise max_connections.`);
    if (o.check_lag_ms >= 1000) all.push(`Checks start up to ${o.check_lag_ms} ms late.`);
    if (o.left_out) all.push(`${plural(o.left_out, "line")} more; lvsd status shows all.`);
    return all;
  }

  function verdict(o) {
    const broken = o.services.filter((s) => s.state === "broken");
    const all = alerts(o);
    if (!o.dataplane.connected && !o.dataplane.idle) return ["bad", "No dataplane answers"];
    if (broken.length) return ["bad", `${plural(broken.length, "service")} broken: ${broken[0].name}${broken.length > 1 ? ", …" : ""}`];
    if (o.down) return ["warn", `${plural(o.down, "server")} down; every service serves`];
    if (o.suspicious) return ["warn", `${plural(o.suspicious, "server")} suspicious: clients get no answer`];
    if (all.length) return ["warn", all[0]];
    return ["good", `All is well: ${plural(o.services.length, "service")}, ${o.usable} of ${plural(o.servers, "server")} usable`];
  }

  function showTrouble(o) {
    const lines = alerts(o);
    for (const s of o.services) if (s.trouble) lines.push(`${s.name} (${s.address}): ${s.trouble}.`);
    $("trouble").hidden = !lines.length && !o.broken.length;
    fill($("alerts"), lines.map((line) => make("li", line)));
    if (!o.broken.length) return fill($("broken"), []);
    const rows = o.broken.map((b) => make("tr", [
      cell("Server", make("strong", b.server)),
      cell("Service", b.name),
      cell("State", make("span", b.health === "down" ? "DOWN" : b.health, `word ${b.health === "down" ? "bad" : "warn"}`)),
      cell("Why", (b.reason || "its checks fail") + (b.fix ? `. To do ${b.fix}` : "")),
      cell("For", lasted(b.since), "n"),
      cell("Connections", String(b.active), "n"),
      actions(b.name, b.service, b.server, b.admin, "broken"),
    ]));
    const more = o.down + o.suspicious > o.broken.length ? [make("p", `… and ${o.down + o.suspicious - o.broken.length} more.`, "soft")] : [];
    fill($("broken"), [table(["Server", "Service", "State", "Why", "For", "Connections", ""], rows), ...more]);
  }

  function ms(us) {
    return us < 10000 ? `${(us / 1000).toFixed(1)} ms` : `${Math.round(us / 1000)} ms`;
  }

  function cell(label, content, cls) {
    return make("td", content, cls, { "data-label": label });
  }

  function table(titles, rows) {
    const numbers = ["Weight", "Active", "Inactive", "For", "Connections", "Conns/s", "Packets"];
    const head = titles.map((t) => make("th", t, numbers.includes(t) ? "n" : "", { scope: "col" }));
    return make("table", [make("thead", make("tr", head)), make("tbody", rows)], "cards");
  }

  // ---- buttons

  function actions(name, service, server, admin, place) {
    const td = make("td", [], "do", { "data-label": "" });
    if (!may.change) return td;
    const button = (state, word) => {
      const b = make("button", word, "", { type: "button", "aria-label": `${word} ${server} of ${name}` });
      b.dataset.key = `${place} ${state} ${server} ${name}`;
      b.addEventListener("click", () => ask(name, service, server, state));
      td.append(b);
    };
    if (admin !== "ready") button("ready", "Put back");
    if (admin !== "drain") button("drain", "Drain");
    if (admin !== "maintenance") button("maintenance", "Maintenance");
    return td;
  }

  const WHAT = {
    drain: ["Drain", "gets no new connections; those that it has go on."],
    maintenance: ["Maintenance", "is drained, for as long as the service's drain says, and then taken out."],
    ready: ["Put back", "may have connections again, if its checks succeed."],
  };

  function ask(name, service, server, state) {
    const [word, what] = WHAT[state];
    $("ask-title").textContent = `${word}: ${server}`;
    $("ask-what").textContent = `${server} of ${name} ${what}`;
    $("ask-go").textContent = word;
    $("ask-error").hidden = true;
    $("ask-why").value = "";
    const split = server.lastIndexOf(":");
    const target = {
      service,
      host: server.slice(0, split).replace(/^\[|\]$/g, ""),
      port: Number(server.slice(split + 1)),
    };
    let force = false;
    $("ask-form").onsubmit = async (event) => {
      event.preventDefault();
      $("ask-go").disabled = true;
      const body = { target, state, force };
      if ($("ask-why").value.trim()) body.why = $("ask-why").value.trim();
      if ($("ask-who").value.trim()) body.who = $("ask-who").value.trim();
      try {
        const done = await call("v1/admin", body);
        $("ask").close();
        await refresh();
        if (done.warnings.length) $("rights").textContent = done.warnings.join("; ");
      } catch (error) {
        $("ask-error").textContent = error.message;
        $("ask-error").hidden = false;
        // The last usable server of a service: whoever wants it asks once more.
        force = error.status === 409 && state !== "ready";
        if (force) $("ask-go").textContent = `${word} nevertheless`;
      } finally {
        $("ask-go").disabled = false;
      }
    };
    $("ask").showModal();
    $("ask-why").focus();
  }

  async function unlock() {
    try {
      const me = await call("v1/whoami");
      may.change = me.may_change;
      may.why = me.why || "";
    } catch (error) {
      may.change = false;
      may.why = error.message;
      may.token = "";
      sessionStorage.removeItem("token");
    }
    // Where no token is configured there is nothing to unlock.
    const locked = !may.change && !/header/.test(may.why) && !/not the token/.test(may.why);
    $("unlock").hidden = may.change || locked;
    $("rights").textContent = may.change ? "Changes are allowed." : locked ? "Read only." : /not the token/.test(may.why) ? may.why : "";
    $("rights").title = may.why;
  }

  // ---- how everything is

  function showTotals(o) {
    const rates = o.rates;
    const all = [
      ["Services", String(o.services.length)],
      ["Usable servers", `${o.usable} of ${o.servers}`],
      ["Connections", short(o.connections)],
      ["Table", o.capacity ? `${((100 * o.connections) / o.capacity).toFixed(1)} % used` : "?"],
      ["New connections/s", short(rates.conns)],
      ["Packets/s in", short(rates.in_packets)],
      ["Bits/s in", short(rates.in_bytes * 8)],
      ["Bits/s out", short(rates.out_bytes * 8)],
      ["lvsd up for", lasted(o.uptime)],
    ];
    fill($("totals"), all.map(([k, v]) => make("div", [make("dt", k), make("dd", v)])));
    $("about").textContent = `lvsd ${o.version}, ${o.config}.`;
  }

  const WORDS = { ok: ["good", "OK"], degraded: ["warn", "degraded"], suspicious: ["warn", "suspicious"], broken: ["bad", "BROKEN"] };

  function showServices(o) {
    const words = $("filter").value.trim().toLowerCase();
    const fits = (s) => !words || s.name.toLowerCase().includes(words) || s.address.includes(words);
    const shown = o.services.filter(fits);
    const list = $("list");
    const there = new Map([...list.querySelectorAll("details")].map((d) => [d.dataset.key, d]));
    const wanted = [];
    for (const s of shown.slice(0, 500)) {
      const key = `${s.name} ${s.address}`;
      let d = there.get(key);
      if (!d) {
        d = make("details", [make("summary", []), make("div", [], "inside")]);
        d.dataset.key = key;
        d.dataset.name = s.name;
        d.dataset.address = s.address;
        d.addEventListener("toggle", () => {
          if (d.open) unfold(d);
          else open.delete(key);
        });
      }
      const [cls, word] = WORDS[s.state] || ["none", s.state];
      fill(d.firstElementChild, [
        make("span", make("span", word, `word ${cls}`)),
        make("span", [
          make("span", s.name, "name"),
          s.name === s.address ? null : make("span", s.address, "address"),
          s.trouble ? make("span", s.trouble, "trouble") : null,
        ]),
        make("span", `${s.usable} of ${plural(s.servers, "server")} usable${s.out_of_service ? `, ${s.out_of_service} out` : ""}`, "soft"),
        make("span", `${short(s.active)} active, ${short(s.rates.conns)}/s`, "soft"),
      ]);
      wanted.push(d);
    }
    const rest = shown.length - wanted.length;
    const note = rest > 0 ? `${plural(rest, "service")} more; filter to see them.` : shown.length ? "" : o.services.length ? "No service fits the filter." : "The file has no service.";
    const last = make("p", note, "soft");
    const now = [...list.children];
    const same = now.length === wanted.length + 1 && wanted.every((d, n) => d === now[n]) && now[now.length - 1].textContent === note;
    if (!same) {
      const focus = document.activeElement;
      list.replaceChildren(...wanted, last);
      if (focus && list.contains(focus)) focus.focus();
    }
  }

  async function unfold(d) {
    open.set(d.dataset.key, d);
    try {
      const all = await call(`v1/services/${encodeURIComponent(d.dataset.name)}`);
      const one = all.find((s) => s.address === d.dataset.address);
      if (one) showServers(d, one);
    } catch (error) {
      fill(d.lastElementChild, [make("p", error.message, "alert")]);
    }
  }

  function showServers(d, service) {
    const s = service.status;
    const dataplane = new Map(((service.dataplane || {}).servers || []).map((e) => [e.server, e]));
    const rows = s.servers.slice(0, 500).map((server) => {
      const health = { up: ["good", "up"], down: ["bad", "DOWN"], suspicious: ["warn", "suspicious"] }[server.health] || ["none", server.health];
      const e = dataplane.get(server.server);
      const notes = [];
      if (server.reason) notes.push(server.reason);
      if (server.fix) notes.push(`to do ${server.fix}`);
      const checks = server.checks;
      if (checks) {
        notes.push(`checks take ${ms(checks.last_us)}, p50 ${ms(checks.p50_us)}, p99 ${ms(checks.p99_us)}`);
        if (checks.falls_in_day) notes.push(`went down ${plural(checks.falls_in_day, "time")} in 24 h, for ${lasted(checks.down_seconds_in_day)}`);
      }
      if (server.check_not_made) notes.push("not checked: " + server.check_not_made.reason);
      if (server.configured === null) notes.push(s.sorry_server === server.server ? "sorry server" : "not in the file");
      if (server.weight === null) notes.push("the dataplane does not have it");
      const admin = server.admin === "ready" ? null : make("span", server.admin, "word warn");
      return make("tr", [
        cell("Server", make("strong", server.server)),
        cell("Health", [make("span", health[1], `word ${health[0]}`), admin ? " " : null, admin]),
        cell("For", lasted(server.since), "n"),
        cell("Weight", server.weight === null ? "–" : String(server.weight), "n"),
        cell("Active", String(server.active), "n"),
        cell("Inactive", String(server.inactive), "n"),
        cell("Conns/s", e ? short(e.stats.rates.conns) : "–", "n"),
        cell("Notes", notes.join("; ")),
        actions(s.name, s.service, server.server, server.admin, "list"),
      ]);
    });
    const config = service.dataplane ? service.dataplane.config.scheduler : "";
    const about = config ? `Scheduler ${config}.` : "The dataplane does not have this service.";
    const more = s.servers.length > 500 ? ` ${s.servers.length - 500} servers more: lvsd status shows all.` : "";
    fill(d.lastElementChild, [
      table(["Server", "Health", "For", "Weight", "Active", "Inactive", "Conns/s", "Notes", ""], rows),
      make("p", about + more, "soft"),
    ]);
  }

  function showDrops(o) {
    if (!o.drops.length) return fill($("drops"), [make("p", "None.", "soft")]);
    const rows = o.drops.map((r) => make("tr", [
      cell("Reason", make("strong", r.reason)),
      cell("Packets", short(r.count), "n"),
      cell("What", r.help),
      cell("Remedy", r.remedy),
    ]));
    fill($("drops"), [table(["Reason", "Packets", "What", "Remedy"], rows)]);
  }

  async function showEvents() {
    let told = await call(`v1/events?after=${lastEvent}`);
    // After a restart lvsd counts anew.
    if (told.started_ms !== countedFrom) {
      if (countedFrom) told = await call("v1/events?after=0");
      countedFrom = told.started_ms;
      lastEvent = 0;
    }
    for (const e of told.events) {
      lastEvent = Math.max(lastEvent, e.seq);
      events.unshift(e);
    }
    if (!told.events.length && $("events").children.length) return;
    events.length = Math.min(events.length, 200);
    const bad = /down|lost|refused|panic_on|sorry_on|withdrawn|drift/;
    fill($("events"), events.length ? events.map((e) => make("li", [
      make("time", clock(e.time_ms), "", { datetime: new Date(e.time_ms).toISOString() }),
      make("span", make("span", e.event.replaceAll("_", " "), `word ${bad.test(e.event) ? "bad" : "none"}`)),
      make("span", [e.service, e.server, e.message].filter(Boolean).join(" · ")),
    ])) : [make("li", "Nothing yet.", "soft")]);
  }

  // ---- an hour of health and traffic

  function color(name) {
    return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  }

  function chart(id, time, series) {
    const place = $(id);
    const width = Math.max(200, place.clientWidth);
    const height = place.clientHeight;
    const data = [time, ...series.map((s) => s.values)];
    const dark = matchMedia("(prefers-color-scheme: dark)").matches;
    const known = charts[id];
    const few = time.length < 4;
    const same = known && known.dark === dark && known.width === width && known.height === height && known.few === few;
    if (same) return known.plot.setData(data);
    if (known) known.plot.destroy();
    const axis = { stroke: color("--soft"), grid: { stroke: color("--line"), width: 1 }, ticks: { show: false }, font: "11px system-ui" };
    const plot = new uPlot({
      width, height, cursor: { show: false }, legend: { show: false }, padding: [8, 12, 0, 0],
      scales: { y: { range: (u, min, max) => [0, Math.max(max, 1) * 1.1] } },
      axes: [{ ...axis, values: (u, all) => all.map((t) => clock(t * 1000).slice(0, 5)), space: 60, size: 24 },
        { ...axis, values: (u, all) => all.map((v) => (v === Math.round(v) || v >= 10 ? short(v) : "")), size: 46 }],
      series: [{}, ...series.map((s) => ({ label: s.label, stroke: color(s.color), width: 1.5, fill: s.fill ? `${color(s.color)}22` : undefined, points: { show: few } }))],
    }, data, place);
    charts[id] = { plot, dark, width, height, few };
  }

  async function showHistory() {
    if (typeof uPlot === "undefined") return;
    const h = await call("v1/history");
    $("no-history").hidden = h.time.length > 1;
    if (h.time.length < 2) return;
    const bits = (all) => all.map((v) => v * 8);
    chart("chart-health", h.time, [
      { label: "in the file", values: h.servers, color: "--soft" },
      { label: "usable", values: h.usable, color: "--good", fill: true },
    ]);
    chart("chart-connections", h.time, [{ label: "connections/s", values: h.connections, color: "--one", fill: true }]);
    chart("chart-traffic", h.time, [
      { label: "in", values: bits(h.in_bytes), color: "--one" },
      { label: "out", values: bits(h.out_bytes), color: "--two" },
    ]);
  }

  // ---- again and again

  async function refresh() {
    try {
      overview = await call("v1/overview");
      const [cls, words] = verdict(overview);
      if ($("verdict").textContent !== words) $("verdict").textContent = words;
      $("verdict").className = cls;
      document.title = cls === "good" ? "lvsd" : `${cls === "bad" ? "✖" : "!"} ${words} – lvsd`;
      showTrouble(overview);
      showTotals(overview);
      showServices(overview);
      showDrops(overview);
      await Promise.all([...open.values()].filter((d) => d.isConnected).slice(0, 8).map(unfold));
      await showEvents();
      if (Date.now() >= historyDue) {
        historyDue = Date.now() + HISTORY_EVERY;
        await showHistory();
        if (!$("no-history").hidden) historyDue = 0;
      }
    } catch (error) {
      $("verdict").className = "bad";
      $("verdict").textContent = error.status ? error.message : "lvsd does not answer; what is shown below is old";
      document.title = "✖ lvsd does not answer";
    }
  }

  async function run() {
    for (;;) {
      if (!document.hidden) await refresh();
      const many = overview && overview.services.length > 500 ? 3 : 1;
      await new Promise((done) => setTimeout(done, EVERY * many));
    }
  }

  $("unlock").addEventListener("submit", async (event) => {
    event.preventDefault();
    may.token = $("token").value.trim();
    sessionStorage.setItem("token", may.token);
    $("token").value = "";
    await unlock();
    await refresh();
  });
  $("ask-cancel").addEventListener("click", () => $("ask").close());
  $("filter").addEventListener("input", () => overview && showServices(overview));
  document.addEventListener("keydown", (event) => {
    const typing = event.target instanceof HTMLInputElement;
    if (event.key === "/" && !typing && !$("ask").open) {
      event.preventDefault();
      $("filter").focus();
    } else if (event.key === "Escape" && event.target === $("filter")) {
      $("filter").value = "";
      if (overview) showServices(overview);
    }
  });
  document.addEventListener("visibilitychange", () => document.hidden || refresh());
  addEventListener("resize", () => { historyDue = 0; });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { historyDue = 0; });
  unlock().then(run);
})();
