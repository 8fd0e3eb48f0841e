import { useEffect, useMemo, useRef, useState } from "preact/hooks";
import { ask, follow, may, type FullJob, type Job, type Page, type Timeline } from "./api";
import { Act, ago, Bar, Calls, Copy, Fault, go, Link, Needs, Segments, State, time, useLive, Why } from "./parts";

const STATES = ["", "queued", "processing", "completed", "failed", "canceled"];
const TOKENS = ["kind", "queue", "code", "since", "until"];
const UNITS: Record<string, number> = { s: 1, m: 60, h: 3600, d: 86400 };

// `kind:video code:corrupt_input since:2h`, as somebody types it, to the words of the address.
function tokens(typed: string): Record<string, string> {
  return Object.fromEntries(typed.split(/\s+/).filter(Boolean).map((word) => {
    const [name, ...value] = word.split(":");
    if (![...TOKENS, "state"].includes(name) || !value.join(":")) throw new Error(`“${word}” is no filter. Known: state, ${TOKENS.join(", ")}, each as name:value.`);
    return [name, value.join(":")];
  }));
}

// A moment: `2h` ago, or a date.
function moment(given: string): string {
  const ago = /^(\d+)([smhd])$/.exec(given);
  const at = ago ? Date.now() - Number(ago[1]) * UNITS[ago[2]] * 1000 : Date.parse(given);
  if (Number.isNaN(at)) throw new Error(`“${given}” is no time: take 30m, 2h, 7d or 2026-01-31.`);
  return new Date(at).toISOString();
}

// The filter as the API takes it. `since` is fixed when the address is read, so that all pages mean the same.
function filter(given: Record<string, string>): Record<string, string> {
  const { kind, queue, code, since, until } = given;
  return {
    ...(kind && { kind }), ...(queue && { queue }), ...(code && { error_code: code }),
    ...(since && { created_after: moment(since) }), ...(until && { created_before: moment(until) }),
  };
}

export function Jobs() {
  const query = new URLSearchParams(location.search);
  const given = Object.fromEntries([...query].filter(([n, v]) => v && [...TOKENS, "state"].includes(n)));
  const state = given.state ?? "";
  const where = new URLSearchParams(given).toString();
  const [rows, setRows] = useState<Job[]>();
  const [fresh, setFresh] = useState<Job[]>([]);
  const [cursor, setCursor] = useState<string | null>();
  const [error, setError] = useState<Error>();
  const [paused, setPaused] = useState(false);
  const seen = useRef<Job[]>([]);
  const asked = useMemo(() => { try { return filter(given); } catch (e) { setError(e as Error); return undefined; } }, [where]);
  const load = (more = "") => ask<Page<Job>>(`/v1/jobs?limit=50&${new URLSearchParams({ ...asked, ...(state && { state }) })}${more}`);
  const show = (list: Job[]) => { seen.current = list; setRows(list); };
  const begin = () => load().then((p) => { show(p.data); setFresh([]); setCursor(p.next_cursor); setError(undefined); }, setError);

  // Rows stay where they are: those shown change in place, those that are new wait to be asked for.
  const refresh = () => load().then((p) => {
    const now = new Map(p.data.map((j) => [j.id, j]));
    const known = new Set(seen.current.map((j) => j.id));
    show(seen.current.map((j) => now.get(j.id) ?? j));
    setFresh(p.data.filter((j) => !known.has(j.id) && j.id > (seen.current[0]?.id ?? "")));
  }, setError);
  useEffect(() => { if (asked) begin(); }, [where]);
  useEffect(() => (paused || !asked ? undefined : follow({}, refresh)), [where, paused]);

  const more = () => load(`&cursor=${cursor}`).then((p) => { show([...seen.current, ...p.data]); setCursor(p.next_cursor); }, setError);
  const to = (next: Record<string, string>) => `/ui/jobs?${new URLSearchParams(Object.entries(next).filter(([, v]) => v))}`;
  const search = (event: SubmitEvent) => {
    event.preventDefault();
    const form = event.currentTarget as HTMLFormElement;
    try {
      const typed = tokens(String(new FormData(form).get("filter")));
      filter(typed);
      form.reset();
      go(to({ ...given, ...typed }));
    } catch (e) { setError(e as Error); }
  };
  return (
    <main>
      <h1>Jobs</h1>
      <nav class="tabs" aria-label="States">
        {STATES.map((s) => <Link to={to({ ...given, state: s })} aria-current={s === state ? "page" : undefined}>{s || "all"}</Link>)}
      </nav>
      <form class="actions" onSubmit={search}>
        <input name="filter" type="search" aria-label="Filter" placeholder="kind:video code:corrupt_input since:2h" class="filter" />
        <button>Filter</button>
        <button type="button" aria-pressed={paused} onClick={() => setPaused(!paused)}>{paused ? "Live again" : "Pause live rows"}</button>
      </form>
      <p class="tokens">
        {Object.entries(given).filter(([n]) => n !== "state").map(([n, v]) => <Link to={to({ ...given, [n]: "" })}>{n}:{v} ✕</Link>)}
      </p>
      <Fault error={error} />
      {asked && <Bulk state={state} asked={asked} done={begin} />}
      <p class="actions">{fresh.length > 0 && <button type="button" onClick={begin}>{fresh.length}{fresh.length === 50 && "+"} new</button>}</p>
      <JobTable rows={rows} />
      {cursor && <button type="button" onClick={more}>More</button>}
    </main>
  );
}

// What is done to all that match, and not to those alone that are on the screen.
function Bulk({ state, asked, done }: { state: string; asked: Record<string, string>; done: () => void }) {
  const [said, setSaid] = useState("");
  const [fault, setFault] = useState<Error>();
  const [busy, setBusy] = useState(false);
  const words = Object.entries(asked).map(([n, v]) => `${n} ${v}`).join(", ") || "without a filter";
  const all = (what: "cancel" | "replay", which: string) => async () => {
    if (!confirm(`${what === "cancel" ? "Cancel" : "Replay"} all ${which} jobs (${words})?`)) return;
    setBusy(true);
    setFault(undefined);
    try {
      let changed = 0;
      for (let before: string | null | undefined; before !== null;) {
        const one: { changed: number; next: string | null } = await ask(`/v1/jobs/${what}`, "POST", { filter: asked, ...(before && { before }) });
        changed += one.changed;
        before = one.next;
        setSaid(`${changed} ${what === "cancel" ? "canceled, or told to their workers" : "queued again"}${before ? " …" : "."}`);
      }
    } catch (e) { setFault(e as Error); }
    setBusy(false);
    done();
  };
  return (
    <>
      <p class="actions">
        {["", "queued", "processing"].includes(state) && <Act scope="jobs:write" on={all("cancel", "queued and processing")} disabled={busy}>Cancel all that match</Act>}
        {["", "failed"].includes(state) && <Act scope="jobs:write" on={all("replay", "failed")} disabled={busy}>Replay all that match</Act>}
        <span role="status">{said}</span>
      </p>
      <Fault error={fault} />
    </>
  );
}

export function JobTable({ rows }: { rows?: Job[] }) {
  if (!rows) return <p>Loading…</p>;
  if (!rows.length) return <p>There is nothing here.</p>;
  return (
    <div class="wide" tabIndex={0} role="region" aria-label="Jobs">
      <table>
        <thead><tr><th>Job</th><th>State</th><th>Kind</th><th>Queue</th><th>Progress</th><th>Attempt</th><th>Created</th><th>Error</th></tr></thead>
        <tbody>
          {rows.map((j) => (
            <tr key={j.id}>
              <td><Link to={`/ui/jobs/${j.id}`}><code>…{j.id.slice(-8)}</code></Link></td>
              <td><State of={j.state} dead={j.dead_letter} /></td>
              <td><Link to={`/ui/jobs?kind=${j.kind}`}>{j.kind}</Link></td>
              <td><Link to={`/ui/jobs?queue=${j.queue}`}>{j.queue}</Link></td>
              <td>{j.state === "processing" ? <><Bar percent={j.progress} label={`Progress of ${j.id}`} /> {j.stage}</> : ""}</td>
              <td>{j.attempt}/{j.max_attempts}</td>
              <td>{ago(j.created_at)}</td>
              <td>{j.error && <Link to={`/ui/jobs?state=failed&code=${j.error.code}`}>{j.error.code}</Link>}</td>
            </tr>
          ))}
        </tbody>
      </table>
    </div>
  );
}

export function JobPage({ id }: { id: string }) {
  const { value: job, error, again } = useLive(() => ask<Job>(`/v1/jobs/${id}`), [id], { job_id: id });
  const [timeline, setTimeline] = useState<Timeline>();
  const [full, setFull] = useState<FullJob>();
  const [fault, setFault] = useState<Error>();
  useEffect(() => {
    if (!job) return;
    ask<Timeline>(`/v1/jobs/${id}/timeline`).then(setTimeline, setFault);
    if (may("dlq:manage")) ask<FullJob>(`/v1/dead-letters/${id}`).then(setFull, () => undefined);
  }, [id, job?.state, job?.attempt, job?.stage]);
  const act = (what: string) => () => ask(`/v1/jobs/${id}/${what}`, "POST").then(again, setFault);
  if (!job) return <main><h1>Job</h1><Fault error={error} /></main>;
  const attempts: (FullJob["attempts"][number] | Job["attempts"][number])[] = full?.attempts ?? job.attempts;
  const live = ["queued", "processing"].includes(job.state);
  return (
    <main>
      <h1>Job <code>{job.id}</code></h1>
      <p>
        <State of={job.state} dead={job.dead_letter} /> {job.kind} on <Link to={`/ui/jobs?queue=${job.queue}`}>{job.queue}</Link>
        {job.media_id && <> for <Link to={`/ui/media/${job.media_id}`}>its media</Link></>}
        {job.position && <> · number {job.position} in its queue</>}
        {job.estimate?.p50_seconds != null && <> · about {time(job.estimate.p50_seconds)} left ({job.estimate.basis})</>}
      </p>
      {job.state === "processing" && <p><Bar percent={job.progress} label="Progress" /> {job.stage} {job.progress?.toFixed(0)} %</p>}
      <Why error={job.error} />
      <p class="actions">
        {live && <Act scope="jobs:write" on={act("cancel")}>Cancel</Act>}
        {job.state === "failed" && <Act scope="jobs:write" on={act("replay")}>Replay</Act>}
      </p>
      <Calls of={["get", ...(live ? ["cancel"] : []), ...(job.state === "failed" ? ["replay"] : [])].map((what) => ({
        name: what, method: what === "get" ? "GET" : "POST", path: `/v1/jobs/${id}${what === "get" ? "" : `/${what}`}`,
        python: `client.jobs.${what}("${id}")`, command: `mediamill jobs ${what} ${id}`,
      }))} />
      <Fault error={fault ?? error} />
      <Segments of={timeline} />
      <h2>Attempts</h2>
      <Needs scope="dlq:manage" for="Commands and logs" />
      {attempts.map((a) => (
        <details key={`${id} ${a.started_at}`} open={a === attempts[attempts.length - 1]}>
          <summary>{a.attempt} · {a.outcome ?? "running"} · {a.worker} {a.started_at && a.finished_at
            && <>· {time((Date.parse(a.finished_at) - Date.parse(a.started_at)) / 1000)}</>} {a.error && <b>{a.error.code}</b>}</summary>
          <Why error={a.error} />
          {"commands" in a && a.commands?.map((c) => (
            <figure>
              <figcaption>{c.label} · exit {c.exit ?? 0} after {time(c.wall_seconds)} <Copy text={c.command.map(quoted).join(" ")} /></figcaption>
              <pre>{c.command.map(quoted).join(" ")}</pre>
            </figure>
          ))}
          {"log_tail" in a && a.log_tail && <figure><figcaption>Last words of its tools</figcaption><pre>{a.log_tail}</pre></figure>}
          {"commands" in a && !a.commands?.length && !a.log_tail && <p>It ran no tool.</p>}
        </details>
      ))}
      {!attempts.length && <p>None yet.</p>}
      <details><summary>JSON</summary><p><Copy text={JSON.stringify(full ?? job, null, 2)} /></p><pre>{JSON.stringify(full ?? job, null, 2)}</pre></details>
    </main>
  );
}

const quoted = (word: string) => /^[\w@%+=:,./-]+$/.test(word) ? word : `'${word.replace(/'/g, `'\\''`)}'`;
