import { useState } from "preact/hooks";
import { ask, may, type DeadGroup, type Endpoint, type Figures, type Job, type Page, type Queue, type Worker } from "./api";
import { Charts } from "./charts";
import { JobTable } from "./jobs";
import { Act, ago, Fault, Link, Needs, time, useLive } from "./parts";

const OLD_SECONDS = 300;

// What a key may not see is left out of the picture, and not an error.
const allowed = <T,>(scope: string, path: string): Promise<Page<T> | undefined> =>
  may(scope) ? ask<Page<T>>(path) : Promise.resolve(undefined);

export function Overview() {
  const { value, error } = useLive(async () => {
    const [queues, workers, dead, endpoints, day] = await Promise.all([
      allowed<Queue>("operate", "/v1/queues"),
      allowed<Worker>("operate", "/v1/workers"),
      allowed<DeadGroup>("dlq:manage", "/v1/dead-letters/groups"),
      allowed<Endpoint>("webhooks:manage", "/v1/webhook-endpoints?limit=200"),
      ask<Figures>("/v1/figures?minutes=1440"),
    ]);
    return { queues: queues?.data, workers: workers?.data, dead: dead?.data, endpoints: endpoints?.data, day };
  }, [], {}, 5);
  if (!value) return <main><h1>Overview</h1><Fault error={error} /></main>;
  const { queues, workers, dead, endpoints, day } = value;
  const sum = (f: (q: Queue) => number) => queues?.reduce((n, q) => n + f(q), 0);
  const failed = day.steps.reduce((n, step) => n + step.failed, 0);
  const oldest = queues && Math.max(0, ...queues.map((q) => q.oldest_seconds));
  const needs = attention(queues ?? [], workers, dead ?? [], endpoints ?? []);
  return (
    <main>
      <h1>Overview</h1>
      <p role="status" class={needs.length ? "health bad" : "health"}>
        {needs.length ? `Degraded: ${needs[0].text}.` : "Healthy: all queues move and nothing waits for you."}
      </p>
      <Fault error={error} />
      <dl class="numbers">
        <div><dt>Queued</dt><dd>{sum((q) => q.queued) ?? "–"}</dd></div>
        <div><dt>Oldest waits</dt><dd>{oldest === undefined ? "–" : time(oldest)}</dd></div>
        <div><dt>Running of slots</dt><dd>{queues ? `${sum((q) => q.processing)} / ${sum((q) => q.slots)}` : "–"}</dd></div>
        <div><dt>Failed in 24 h</dt><dd>{failed}{!day.whole && "+"}</dd></div>
      </dl>
      <Charts />
      <h2>Needs attention</h2>
      {needs.length ? <ul>{needs.map((n) => <li><Link to={n.to}>{n.text}</Link></li>)}</ul> : <p>Nothing.</p>}
      {!queues && <p>This key may not see queues and workers: it lacks the scope <code>operate</code>.</p>}
    </main>
  );
}

function attention(queues: Queue[], workers: Worker[] | undefined, dead: DeadGroup[], endpoints: Endpoint[]) {
  const found: { text: string; to: string }[] = [];
  if (workers && !workers.some((w) => !w.draining)) found.push({ text: "no worker takes jobs", to: "/ui/workers" });
  for (const q of queues) {
    if (q.paused) found.push({ text: `the queue ${q.queue} is paused`, to: "/ui/queues" });
    else if (q.oldest_seconds > OLD_SECONDS) found.push({ text: `a job of ${q.queue} has waited for ${time(q.oldest_seconds)}`, to: `/ui/jobs?state=queued&queue=${q.queue}` });
  }
  for (const { code, count } of dead) found.push({ text: `${count} dead letter${count > 1 ? "s" : ""}: ${code ?? "unknown"}`, to: "/ui/dead-letters" });
  for (const e of endpoints) {
    if (e.state === "disabled" && e.reason && e.reason !== "by its owner") found.push({ text: `the endpoint ${e.url} is off: ${e.reason}`, to: `/ui/webhooks/${e.id}` });
    else if (e.failing_since) found.push({ text: `the endpoint ${e.url} has failed since ${ago(e.failing_since)}`, to: `/ui/webhooks/${e.id}` });
  }
  return found;
}

export const DeadLetters = () => <main><h1>Dead letters</h1><Needs scope="dlq:manage" for="Dead letters"><Dead /></Needs></main>;

const CANARIES = 3;

function Dead() {
  const { value, error, again } = useLive(() => ask<Page<DeadGroup>>("/v1/dead-letters/groups"), [], {});
  const [said, setSaid] = useState(""); // stays when the last of a code has left the list
  return (
    <>
      <p role="status">{said}</p>
      <Fault error={error} />
      {value && !value.data.length && <p>There are none.</p>}
      {value?.data.map((g) => <DeadGroupOf key={g.code} of={g} again={again} say={(words) => setSaid(`${g.code}: ${words}`)} />)}
    </>
  );
}

function DeadGroupOf({ of, again, say }: { of: DeadGroup; again: () => void; say: (words: string) => void }) {
  const [fault, setFault] = useState<Error>();
  const [busy, setBusy] = useState(false);
  const filter = { code: of.code };
  const { value: sample } = useLive(() => ask<Page<Job>>(`/v1/dead-letters?limit=10&code=${of.code ?? ""}`), [of.code, of.count], undefined, 60);
  const tried = (work: Promise<unknown>) => {
    setBusy(true);
    setFault(undefined);
    return work.then(again, setFault).finally(() => setBusy(false));
  };
  const replay = (limit?: number) => ask<{ replayed: number }>("/v1/dead-letters/replay", "POST", { filter, ...(limit && { limit }) });
  const one = () => tried(ask(`/v1/jobs/${of.newest}/replay`, "POST").then(() => say("1 is queued again.")));
  const all = () => confirm(`Replay all ${of.count} dead letters of ${of.code}?`)
    && tried(replay().then((done) => say(`${done.replayed} are queued again.`)));
  const discard = () => confirm(`Take the newest dead letter of ${of.code} off the list for good?`)
    && tried(ask(`/v1/dead-letters/${of.newest}/discard`, "POST").then(() => say("1 is off the list.")));
  // A few first, and what became of them, before all are sent after them.
  const canary = () => tried((async () => {
    const birds = (await ask<Page<Job>>(`/v1/dead-letters?limit=${CANARIES}&code=${of.code ?? ""}`)).data;
    for (const bird of birds) await ask(`/v1/jobs/${bird.id}/replay`, "POST");
    for (;;) {
      const now = await Promise.all(birds.map((bird) => ask<Job>(`/v1/jobs/${bird.id}`)));
      const ended = now.filter((j) => ["completed", "failed", "canceled"].includes(j.state));
      const good = now.filter((j) => j.state === "completed").length;
      say(`Canary: ${good} of ${birds.length} completed${ended.length < birds.length ? ", the others run" : good === birds.length ? "; the rest may follow." : "; look at those that failed before you replay the rest."}`);
      if (ended.length === birds.length) return;
      await new Promise((done) => setTimeout(done, 1000));
    }
  })());
  return (
    <section>
      <h2>{of.code ?? "unknown"} <small>{of.count}, first {ago(of.first_at)}, last {ago(of.last_at)}</small></h2>
      <p>{of.detail} <i>{of.advice}</i> <Link to={`/ui/jobs/${of.newest}`}>See the newest.</Link></p>
      <p class="actions">
        <Act scope="jobs:write" on={one} disabled={busy}>Replay one</Act>
        {may("jobs:write") && <Act scope="dlq:manage" on={canary} disabled={busy}>Canary of {Math.min(CANARIES, of.count)}</Act>}
        <Act scope="dlq:manage" on={all} disabled={busy}>Replay all {of.count}</Act>
        <Act scope="dlq:manage" on={discard} disabled={busy}>Discard one</Act>
      </p>
      <Fault error={fault} />
      {sample && sample.data.length > 0 && <JobTable rows={sample.data} />}
    </section>
  );
}

export const Queues = () => <main><h1>Queues</h1><Needs scope="operate" for="Queues"><QueueTable /></Needs></main>;

function QueueTable() {
  const { value, error, again } = useLive(() => ask<Page<Queue>>("/v1/queues"), [], undefined, 2);
  const [fault, setFault] = useState<Error>();
  const turn = (q: Queue) => ask(`/v1/queues/${q.queue}/${q.paused ? "resume" : "pause"}`, "POST").then(again, setFault);
  const cap = (q: Queue, text: string) => ask(`/v1/queues/${q.queue}/concurrency`, "PUT", { concurrency: text === "" ? null : Number(text) }).then(again, setFault);
  return (
    <>
      <Fault error={fault ?? error} />
      <div class="wide" tabIndex={0} role="region" aria-label="Queues">
        <table>
          <thead><tr><th>Queue</th><th>Queued</th><th>Running</th><th>Slots</th><th>Oldest</th><th>A minute</th><th>At most</th><th>State</th><th>Change</th></tr></thead>
          <tbody>
            {value?.data.map((q) => (
              <tr key={q.queue}>
                <td><Link to={`/ui/jobs?queue=${q.queue}`}>{q.queue}</Link></td>
                <td>{q.queued}</td><td>{q.processing}</td><td>{q.slots}</td><td>{time(q.oldest_seconds)}</td><td>{q.rate_per_minute}</td>
                <td><input type="number" min={1} aria-label={`At most so many of ${q.queue} at once`} placeholder="–" value={q.concurrency ?? ""} onChange={(e) => cap(q, e.currentTarget.value)} /></td>
                <td>{q.draining ? "draining" : q.paused ? "paused" : "open"}</td>
                <td><Act scope="operate" on={() => turn(q)}>{q.paused ? "Resume" : "Pause"} {q.queue}</Act></td>
              </tr>
            ))}
          </tbody>
        </table>
      </div>
    </>
  );
}

export const Workers = () => <main><h1>Workers</h1><Needs scope="operate" for="Workers"><WorkerTable /></Needs></main>;

function WorkerTable() {
  const { value, error, again } = useLive(() => ask<Page<Worker>>("/v1/workers"), [], undefined, 3);
  const [fault, setFault] = useState<Error>();
  const drain = (w: Worker) => confirm(`Let ${w.id} finish what it runs and leave?`)
    && ask(`/v1/workers/${encodeURIComponent(w.id)}/drain`, "POST").then(again, setFault);
  return (
    <>
      <Fault error={fault ?? error} />
      {value && !value.data.length && <p>No worker was seen lately: start one with <code>mediamill worker</code>.</p>}
      <div class="wide" tabIndex={0} role="region" aria-label="Workers">
        <table>
          <thead><tr><th>Worker</th><th>Host</th><th>Version</th><th>Slots</th><th>Sandbox</th><th>Started</th><th>Seen</th><th>State</th><th>Change</th></tr></thead>
          <tbody>
            {value?.data.map((w) => (
              <tr key={w.id}>
                <td><code>{w.id}</code></td><td>{w.host}</td><td>{w.version}</td>
                <td>{Object.entries(w.slots).map(([q, n]) => `${q} ${n}`).join(", ")}</td>
                <td>{w.sandbox}</td><td>{ago(w.started_at)}</td><td>{ago(w.seen_at)}</td>
                <td>{w.draining ? "draining" : "working"}</td>
                <td>{!w.draining && <Act scope="operate" on={() => drain(w)}>Drain</Act>}</td>
              </tr>
            ))}
          </tbody>
        </table>
      </div>
    </>
  );
}
