// The dashboard of lvsd. Everything that comes from lvsd is put into the page as text, never as markup.
"use strict";
(() => {
  const EVERY = 1000; // ms between two questions while the page is seen
  const HIDDEN_EVERY = 10000; // and while it is not
  const OLD = 5000; // ms without an answer after which the dataplane hangs, and its counters are old
  const FEW = 12; // faulty servers that are shown one by one
  const SERVERS_EVERY = 10000; // ms between two readings of all servers' addresses
  const HISTORY_EVERY = 15000;
  const $ = (id) => document.getElementById(id);
  const may = { token: sessionStorage.getItem("token") || "", change: false, why: "" };
  const open = new Map(); // services that are unfolded: name -> details as last received
  let overview = null;
  let lastEvent = 0;
  let countedFrom = 0;
  let historyDue = 0;
  let asOf = 0; // when lvsd last answered
  const pastDue = new Map(); // when the chart of an unfolded service is due
  const servers = { due: 0, of: new Map() }; // addresses of the servers of each service
  let linked = ""; // the service of a link, until it is unfolded
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

  // Changes the node `old` so that it equals `fresh`. Equal parts stay, and with them the focus, a pressed button and a selection.
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
    // The clock of the director may have been set back since.
    seconds = Math.max(0, seconds);
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

  // The time with its zone, and with its date on another day.
  function moment(ms) {
    const date = new Date(ms);
    const time = date.toLocaleTimeString("en-GB", { timeZoneName: "short" });
    if (date.toDateString() === new Date().toDateString()) return time;
    return `${date.toLocaleDateString("en-GB", { day: "numeric", month: "short" })} ${time}`;
  }

  // A time that shows UTC where the pointer rests.
  function stamp(ms) {
    const utc = new Date(ms).toISOString();
    return make("time", moment(ms), "", { datetime: utc, title: utc });
  }

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
    const answer = await reply.json();
    if (!reply.ok) throw Object.assign(new Error(answer.error.message), { status: reply.status });
    return answer;
  }

  // ---- what is broken, first

  const by = (wish) => `${wish.who ? ` by ${wish.who}` : ""}${wish.why ? ` (${wish.why})` : ""}`;

  const isOld = (o) => o.dataplane.connected && !o.dataplane.idle && o.dataplane.seen_ms !== null && o.dataplane.seen_ms >= OLD;

  const hangs = (o) => `The dataplane has not answered for ${lasted(Math.floor(o.dataplane.seen_ms / 1000))}`;

  // The number of servers that are flapping or slow.
  const having = (o, health) => o.causes.filter((c) => c.health === health).reduce((sum, c) => sum + c.servers, 0);

  function alerts(o) {
    const all = [];
    if (!o.dataplane.connected && !o.dataplane.idle) all.push("No dataplane answers: lvsd does not know whether packets of services are forwarded. To do: the log of lvsd contains the reason (journalctl -u lvsd).");
    if (!o.loaded.ok && o.loaded.time) all.push(`The file was refused, and the old configuration stays: ${o.loaded.message}`);
    all.push(...o.faults);
    for (const line of o.refused) all.push(`Refused by the dataplane: ${line}`);
    for (const line of o.drift) all.push(`Changed by hand: ${line}`);
    const { maintenance, vrrp, announce } = o.director;
    if (maintenance) all.push(`The director is in maintenance${by(maintenance)}, for ${lasted(o.now - maintenance.since)}.`);
    if (vrrp && vrrp.state === "fault") all.push("keepalived is in the state fault. To do: check the interface of [vrrp], and journalctl -u keepalived.");
    if (vrrp && !vrrp.ready) all.push(`Not ready for VRRP: waits for ${vrrp.waits_for}.`);
    for (const line of (vrrp && vrrp.trouble) || []) all.push(`keepalived: ${line}`);
    if (announce && !announce.ready) all.push(`${o.director.missing_peers ? "Routers prefer other directors" : "Announces nothing"}: waits for ${announce.waits_for}.`);
    for (const a of (announce && announce.addresses) || []) if (a.trouble) all.push(`Announcement of ${a.address}: ${a.trouble}`);
    for (const line of o.director.warnings || []) all.push(line);
    if (isOld(o)) all.push(`${hangs(o)}: its counters are old.`);
    if (o.left_out) all.push(`${plural(o.left_out, "line")} more; lvsd status shows all.`);
    return all;
  }

  function verdict(o) {
    const broken = o.services.filter((s) => s.state === "broken");
    const all = alerts(o);
    if (!o.dataplane.connected && !o.dataplane.idle) return ["bad", "No dataplane answers"];
    if (isOld(o)) return ["bad", hangs(o)];
    if (broken.length) return ["bad", `${plural(broken.length, "service")} broken: ${broken[0].name}${broken.length > 1 ? ", …" : ""}`];
    if (o.down) return ["warn", `${plural(o.down, "server")} down; every service serves`];
    if (o.suspicious) return ["warn", `${plural(o.suspicious, "server")} suspicious: clients get no answer`];
    if (all.length) return ["warn", all[0].split(". To do:")[0]];
    const flapping = having(o, "flapping");
    if (flapping) return ["warn", `${plural(flapping, "server")} flapping`];
    return ["good", `All is well: ${plural(o.services.length, "service")}, ${o.usable} of ${plural(o.servers, "server")} usable`];
  }

  // Services with the same trouble in one line.
  function troubles(o) {
    const same = new Map();
    for (const s of o.services) if (s.trouble) same.set(s.trouble, [...(same.get(s.trouble) || []), s]);
    return [...same].map(([trouble, all]) => {
      if (all.length === 1) return `${all[0].name} (${all[0].address}): ${trouble}.`;
      const more = all.length > 3 ? ` and ${all.length - 3} more` : "";
      return `${plural(all.length, "service")}: ${trouble}: ${all.slice(0, 3).map((s) => s.name).join(", ")}${more}.`;
    });
  }

  const STATES = { down: ["bad", "DOWN"], suspicious: ["warn", "suspicious"], flapping: ["warn", "flapping"], slow: ["warn", "slow"] };

  function badge(health) {
    const [cls, word] = STATES[health] || ["none", health];
    return make("span", word, `word ${cls}`);
  }

  // A cause; its link filters the services.
  function causeRow(c) {
    const find = make("a", "show", "", { href: link(c.host || c.service, "") });
    const more = (c.host ? c.services : c.servers) > c.named.length ? ", …" : "";
    return make("tr", [
      cell("Cause", make("strong", c.host || c.service), c.host ? "place" : ""),
      cell("State", badge(c.health)),
      cell("Why", c.reason + (c.fix ? `. To do: ${c.fix}` : "")),
      cell("Servers", `${c.servers}`, "n"),
      cell("Where", c.host ? `${plural(c.services, "service")}: ${c.named.join(", ")}${more}` : c.named.join(", ") + more),
      cell("For", lasted(c.since), "n"),
      cell("", find),
    ]);
  }

  const causeTable = (causes) => table(["Cause", "State", "Why", "Servers", "Where", "For", ""], causes.map(causeRow));

  function showTrouble(o) {
    const lines = [...alerts(o), ...troubles(o)];
    const faulty = o.down + o.suspicious;
    const causes = faulty > FEW ? o.causes : o.causes.filter((c) => c.health === "flapping" || c.health === "slow");
    $("trouble").hidden = !lines.length && !o.broken.length && !causes.length;
    fill($("alerts"), lines.map((line) => make("li", line)));
    const parts = [];
    if (causes.length) parts.push(causeTable(causes));
    if (faulty > FEW && o.causes_in_all > causes.length) parts.push(make("p", `… and ${plural(o.causes_in_all - causes.length, "cause")} more.`, "soft"));
    if (o.broken.length && faulty <= FEW) {
      const rows = o.broken.map((b) => make("tr", [
        cell("Server", make("strong", b.server), "place"),
        cell("Service", b.name),
        cell("State", badge(b.health)),
        cell("Why", (b.reason || "its checks fail") + (b.fix ? `. To do: ${b.fix}` : "")),
        cell("For", lasted(b.since), "n"),
        cell("Connections", String(b.active), "n"),
        actions(b.name, b.service, b.server, b.admin, "broken"),
      ]));
      parts.unshift(table(["Server", "Service", "State", "Why", "For", "Connections", ""], rows));
    }
    fill($("broken"), parts);
  }

  // The overrides of operators, with name, reason and duration.
  function showPeople(o) {
    $("people").hidden = !o.admin.length;
    fill($("admin"), o.admin.map((entry) => {
      const target = entry.target;
      const host = target.host.includes(":") && target.port ? `[${target.host}]` : target.host;
      const of = target.service ? o.services.find((s) => JSON.stringify(s.service) === JSON.stringify(target.service)) : null;
      const where = of ? of.name : target.service ? "a service that is not in the file" : "all services";
      const left = entry.until ? `, ${lasted(Math.max(0, entry.until - o.now))} more` : "";
      return make("li", [
        badge(entry.state), " ", make("span", target.port ? `${host}:${target.port}` : host, "place"),
        ` of ${where}${by(entry)}, for ${lasted(o.now - entry.since)}${left}`,
      ]);
    }));
  }

  // ---- peers, VRRP, announcements, sources

  function showOthers(o) {
    const rows = [];
    const row = (what, good, state, notes) => rows.push(make("tr", [
      cell("What", what), cell("State", make("span", state, `word ${good ? "good" : "warn"}`)), cell("Notes", notes),
    ]));
    const { maintenance, vrrp, announce } = o.director;
    if (maintenance) row("this director", false, "maintenance", `for ${lasted(o.now - maintenance.since)}${by(maintenance)}`);
    if (vrrp) row("keepalived (VRRP)", vrrp.ready && vrrp.state !== "fault" && vrrp.state !== "unknown", vrrp.state,
      `${vrrp.active ? "has" : "does not have"} the virtual addresses; adds ${vrrp.track} to the priority; ${plural(vrrp.changes, "change")} of state`);
    for (const a of (announce && announce.addresses) || []) row(`announcement of ${a.address}`, !a.trouble, a.standing, a.trouble || "");
    for (const p of o.dataplane.peers || []) {
      const tables = (o.dataplane.tables || []).find((t) => t.peer === p.peer);
      const notes = [p.missing ? `${plural(p.missing, "connection")} missing` : "", tables ? `its services: ${tables.state}` : ""];
      row(`peer ${p.peer}`, p.state === "in step", p.state, notes.filter(Boolean).join("; "));
    }
    for (const s of o.sources) {
      const age = s.answered ? `last answer ${lasted(Math.max(0, o.now - s.answered))} ago` : "no answer since lvsd started";
      row(`${s.kind} ${s.name}`, !s.trouble, s.trouble ? "no usable answer" : "answers", [age, plural(s.items, "item")].join("; "));
    }
    $("others").hidden = !rows.length;
    fill($("peers"), rows.length ? [table(["What", "State", "Notes"], rows)] : []);
  }

  function ms(us) {
    return us < 10000 ? `${(us / 1000).toFixed(1)} ms` : `${Math.round(us / 1000)} ms`;
  }

  function cell(label, content, cls) {
    return make("td", content, cls, { "data-label": label });
  }

  function table(titles, rows) {
    const numbers = ["Weight", "Active", "Inactive", "For", "Connections", "Conns/s", "Packets", "Servers", "In 5 min"];
    const head = titles.map((t) => make(t ? "th" : "td", t, numbers.includes(t) ? "n" : "", t ? { scope: "col" } : {}));
    return make("div", make("table", [make("thead", make("tr", head)), make("tbody", rows)], "cards"), "wide");
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
    drain: ["Drain", "gets no new connections; its present connections continue."],
    maintenance: ["Maintenance", "is drained for the time that `drain` of the service sets, and is then removed from the dataplane."],
    ready: ["Put back", "gets new connections again if its checks succeed."],
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
    let needsToken = false;
    let refused = false;
    let who = "";
    try {
      const me = await call("v1/whoami");
      may.change = me.may_change;
      may.why = me.why || "";
      needsToken = me.needs_token;
      refused = needsToken && may.token !== "";
      who = `${me.who}, role ${me.role}`;
    } catch (error) {
      may.change = false;
      may.why = error.message;
      refused = needsToken = error.status === 401;
      may.token = "";
      sessionStorage.removeItem("token");
    }
    // Where no token is configured there is nothing to unlock.
    $("unlock").hidden = may.change || !needsToken;
    $("rights").textContent = may.change ? `Changes are allowed (${who}).` : !needsToken ? "Read only." : refused ? may.why : "";
    $("rights").title = may.why;
  }

  // ---- how everything is

  function showTotals(o) {
    const rates = o.rates;
    const all = [
      ["Services", String(o.services.length)],
      ["Usable servers", `${o.usable} of ${o.servers}`],
      ["Connections", short(o.dataplane.connections)],
      ["Table", o.dataplane.capacity ? `${((100 * o.dataplane.connections) / o.dataplane.capacity).toFixed(1)} % used` : "?"],
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

  // ---- services, their filter, and links to them

  // A link to the services that a text finds; to one of them if it is named.
  function link(filter, service) {
    const all = new URLSearchParams();
    if (service) all.set("service", service);
    else if (filter) all.set("filter", filter);
    return `#${all}`;
  }

  // The filter in the address of the page, for links and reloads.
  function keepFilter() {
    const all = new URLSearchParams();
    if ($("filter").value) all.set("filter", $("filter").value);
    if ($("state").value) all.set("state", $("state").value);
    history.replaceState(null, "", `#${all}`);
    refilter();
  }

  function takeLink() {
    const all = new URLSearchParams(location.hash.slice(1));
    linked = all.get("service") || "";
    $("filter").value = linked || all.get("filter") || "";
    $("state").value = all.get("state") || "";
    refilter();
  }

  async function refilter() {
    if (!overview) return;
    showServices(overview);
    await readServers();
    showServices(overview);
  }

  // Addresses of servers are read while a filter needs them.
  async function readServers() {
    if (!/[.:0-9]/.test($("filter").value) || Date.now() < servers.due) return;
    servers.due = Date.now() + SERVERS_EVERY;
    const status = await call("v1/status");
    servers.of = new Map(status.services.map((s) => [JSON.stringify(s.service), s.servers.map((one) => one.server).join(" ")]));
  }

  function fits(s) {
    const state = $("state").value;
    if (state === "trouble" ? s.state === "ok" : state === "out" ? !s.out_of_service : state && s.state !== state) return false;
    const words = $("filter").value.trim().toLowerCase().split(/\s+/);
    const text = [s.name, s.address, s.state, s.trouble, servers.of.get(JSON.stringify(s.service))].join(" ").toLowerCase();
    return words.every((word) => text.includes(word));
  }

  function showServices(o) {
    const shown = o.services.filter(fits);
    const list = $("list");
    const there = new Map([...list.querySelectorAll("details")].map((d) => [d.dataset.key, d]));
    const wanted = [];
    for (const s of shown.slice(0, 500)) {
      const key = `${s.name} ${s.address}`;
      let d = there.get(key);
      if (!d) {
        const past = make("figure", [make("figcaption", []), make("div", [], "chart")], "past");
        past.hidden = true;
        d = make("details", [make("summary", []), make("div", [], "inside"), past]);
        d.dataset.key = key;
        d.dataset.name = s.name;
        d.dataset.address = s.address;
        d.addEventListener("toggle", () => {
          if (d.open) unfold(d);
          else fold(key);
        });
      }
      const [cls, word] = WORDS[s.state] || ["none", s.state];
      fill(d.firstElementChild, [
        make("span", make("span", word, `word ${cls}`)),
        make("span", [
          make("span", s.name, s.name === s.address ? "name place" : "name"),
          s.name === s.address ? null : make("span", [" ", make("span", s.address, "address place")]),
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
    const target = linked && wanted.find((d) => d.dataset.name === linked);
    if (target) {
      linked = "";
      target.open = true;
      target.scrollIntoView();
    }
  }

  function fold(key) {
    open.delete(key);
    pastDue.delete(key);
    if (charts[key]) charts[key].plot.destroy();
    delete charts[key];
  }

  async function unfold(d) {
    open.set(d.dataset.key, d);
    try {
      const all = await call(`v1/services/${encodeURIComponent(d.dataset.name)}`);
      const one = all.find((s) => s.address === d.dataset.address);
      if (one) showServers(d, one);
      await showPast(d);
    } catch (error) {
      fill(d.children[1], [make("p", error.message, "alert")]);
    }
  }

  // An hour of one service; several addresses of it have one history.
  async function showPast(d) {
    const key = d.dataset.key;
    if (typeof uPlot === "undefined" || Date.now() < (pastDue.get(key) || 0)) return;
    pastDue.set(key, Date.now() + HISTORY_EVERY);
    const figure = d.querySelector(".past");
    const h = await call(`v1/history?service=${encodeURIComponent(d.dataset.name)}`);
    if (!open.has(key)) return;
    figure.hidden = h.time.length < 2;
    if (figure.hidden) return pastDue.delete(key);
    figure.firstElementChild.textContent = `New connections a second, last hour, all addresses of ${d.dataset.name}; ${unusable(h)}`;
    chart(key, figure.lastElementChild, h.time, [{ label: "new connections a second", values: h.connections, color: "--one", fill: true }]);
  }

  function showServers(d, service) {
    const s = service.status;
    const dataplane = new Map(((service.dataplane || {}).servers || []).map((e) => [e.server, e]));
    const rows = s.servers.slice(0, 500).map((server) => {
      const health = { up: ["good", "up"], down: ["bad", "DOWN"], suspicious: ["warn", "suspicious"] }[server.health] || ["none", server.health];
      const e = dataplane.get(server.server);
      const notes = [];
      if (server.reason) notes.push(server.reason);
      if (server.fix) notes.push(`to do: ${server.fix}`);
      const checks = server.checks;
      if (checks) {
        notes.push(`checks take ${ms(checks.last_us)}, p50 ${ms(checks.p50_us)}, p99 ${ms(checks.p99_us)}`);
        if (checks.falls_in_day) notes.push(`went down ${plural(checks.falls_in_day, "time")} in 24 h, for ${lasted(checks.down_seconds_in_day)}`);
      }
      if (server.latency_us != null) notes.push(`answers new connections in ${ms(server.latency_us)}`);
      if (server.check_not_made) notes.push("not checked: " + server.check_not_made.reason);
      if (server.configured === null) notes.push(s.sorry_server === server.server ? "sorry server" : "not in the file");
      if (server.weight === null) notes.push("the dataplane does not have it");
      const admin = server.admin === "ready" ? null : make("span", server.admin, "word warn");
      return make("tr", [
        cell("Server", make("strong", server.server), "place"),
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
    const packets = (fate, reasons) => {
      const recent = (reasons || []).filter((r) => r.recent).map((r) => `${short(r.recent)} ${r.reason} (first ${lasted(r.since)} ago, last ${lasted(r.ago)} ago)`);
      return recent.length ? ` ${fate} in five minutes: ${recent.join(", ")}.` : "";
    };
    const lost = packets("Refused", s.refusals) + packets("Dropped", s.drops);
    const more = s.servers.length > 500 ? ` ${s.servers.length - 500} servers more: lvsd status shows all.` : "";
    fill(d.children[1], [
      table(["Server", "Health", "For", "Weight", "Active", "Inactive", "Conns/s", "Notes", ""], rows),
      make("p", [about + lost + more, " ", make("a", "Link to this service", "", { href: link("", s.name) })], "soft"),
    ]);
  }

  function showDrops(o) {
    if (!o.drops.length) return fill($("drops"), [make("p", "None.", "soft")]);
    const drops = [...o.drops].sort((one, other) => other.recent - one.recent || other.count - one.count);
    const rows = drops.map((r) => make("tr", [
      cell("Reason", make("strong", r.reason)),
      cell("In 5 min", short(r.recent), "n"),
      cell("Packets", short(r.count), "n"),
      cell("First", r.since === undefined ? "–" : `${lasted(r.since)} ago`),
      cell("Last", r.ago === undefined ? "–" : `${lasted(r.ago)} ago`),
      cell("What", r.help),
      cell("Fix", r.fix),
    ]));
    fill($("drops"), [table(["Reason", "In 5 min", "Packets", "First", "Last", "What", "Fix"], rows)]);
  }

  async function showEvents() {
    let reply = await call(`v1/events?after=${lastEvent}`);
    // After a restart lvsd counts anew.
    if (reply.started_ms !== countedFrom) {
      if (countedFrom) reply = await call("v1/events?after=0");
      countedFrom = reply.started_ms;
      lastEvent = 0;
    }
    for (const e of reply.events) {
      lastEvent = Math.max(lastEvent, e.seq);
      events.unshift(e);
    }
    if (!reply.events.length && $("events").children.length) return;
    events.length = Math.min(events.length, 200);
    const bad = /down|lost|refused|panic_on|sorry_on|withdrawn|drift|suspicious|vip_conflict$/;
    fill($("events"), events.length ? events.map((e) => make("li", [
      stamp(e.time_ms),
      make("span", make("span", e.event.replaceAll("_", " "), `word ${bad.test(e.event) ? "bad" : "none"}`)),
      make("span", [e.service, e.server, e.message].filter(Boolean).join(" · ")),
    ])) : [make("li", "Nothing yet.", "soft")]);
  }

  // ---- an hour of health and traffic

  function color(name) {
    return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  }

  // The number of servers that are not usable, now and at worst.
  function unusable(h) {
    const missing = h.servers.map((n, at) => Math.max(0, n - h.usable[at]));
    return `${missing[missing.length - 1]} of ${plural(h.servers[h.servers.length - 1], "server")} not usable now, ${Math.max(...missing)} at worst`;
  }

  // Draws an hour. Screen readers get the last and the highest value of each line.
  function chart(id, place, time, series) {
    const parts = series.map((s) => `${s.label}: ${short(s.values[s.values.length - 1])} now, ${short(Math.max(...s.values))} at most`);
    place.setAttribute("role", "img");
    place.setAttribute("aria-label", `Last hour. ${parts.join("; ")}.`);
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
      axes: [{ ...axis, values: (u, all) => all.map((t) => clock(t * 1000).slice(0, 5)), incrs: [60, 120, 300, 600, 900, 1800, 3600], space: 60, size: 24 },
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
    const missing = h.servers.map((n, at) => Math.max(0, n - h.usable[at]));
    chart("health", $("chart-health"), h.time, [{ label: "servers not usable", values: missing, color: "--bad", fill: true }]);
    chart("connections", $("chart-connections"), h.time, [{ label: "new connections a second", values: h.connections, color: "--one", fill: true }]);
    chart("traffic", $("chart-traffic"), h.time, [
      { label: "bits a second in", values: bits(h.in_bytes), color: "--one" },
      { label: "bits a second out", values: bits(h.out_bytes), color: "--two" },
    ]);
  }

  // ---- again and again

  // The state of the director where it is seen first: on the page, in its title and in its icon.
  function tell(cls, words) {
    if ($("verdict").textContent !== words) $("verdict").textContent = words;
    $("verdict").className = cls;
    const host = overview ? overview.host : "lvsd";
    $("host").textContent = host;
    const mark = { bad: "✖ ", warn: "! ", good: "" }[cls];
    const title = `${mark}${host}: ${words} – lvsd`;
    if (document.title !== title) document.title = title;
    const shape = cls === "bad" ? "<path d='M4 4l8 8M12 4l-8 8' stroke='#fff' stroke-width='2.5'/>" : cls === "warn" ? "<path d='M8 3v6M8 11v2' stroke='#fff' stroke-width='2.5'/>" : "";
    const fill = { bad: "#b3261e", warn: "#c77700", good: "#1a7f37" }[cls];
    const icon = `data:image/svg+xml,${encodeURIComponent(`<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 16 16'><circle cx='8' cy='8' r='8' fill='${fill}'/>${shape}</svg>`)}`;
    if ($("icon").href !== icon) $("icon").href = icon;
  }

  async function refresh() {
    try {
      const fresh = await call("v1/overview");
      if (!overview) setTimeout(takeLink);
      overview = fresh;
      asOf = Date.now();
      tell(...verdict(overview));
      document.body.classList.toggle("old", isOld(overview) || (!overview.dataplane.connected && !overview.dataplane.idle));
      showTrouble(overview);
      showPeople(overview);
      showOthers(overview);
      showTotals(overview);
      await readServers();
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
      const since = asOf ? ` What is shown below is of ${moment(asOf)}.` : "";
      tell("bad", (error.status ? error.message : "lvsd does not answer.") + since);
      document.body.classList.add("old");
    }
  }

  let wake = () => {}; // ends the wait for the next refresh

  async function run() {
    for (;;) {
      await refresh();
      const many = overview && overview.services.length > 500 ? 3 : 1;
      await new Promise((done) => {
        wake = done;
        setTimeout(done, document.hidden ? HIDDEN_EVERY : EVERY * many);
      });
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
  $("filter").addEventListener("input", keepFilter);
  $("state").addEventListener("change", keepFilter);
  addEventListener("hashchange", takeLink);
  document.addEventListener("keydown", (event) => {
    const typing = event.target instanceof HTMLInputElement || event.target instanceof HTMLSelectElement;
    if (event.key === "/" && !typing && !$("ask").open) {
      event.preventDefault();
      $("filter").focus();
    } else if (event.key === "Escape" && event.target === $("filter")) {
      $("filter").value = "";
      keepFilter();
    }
  });
  document.addEventListener("visibilitychange", () => document.hidden || wake());
  const redraw = () => {
    historyDue = 0;
    pastDue.clear();
  };
  addEventListener("resize", redraw);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  $("zone").textContent = `Times are of ${Intl.DateTimeFormat().resolvedOptions().timeZone}; the pointer on a time shows UTC.`;
  unlock().then(run);
})();
