import { useEffect, useRef, useState } from "preact/hooks";
import { ask, follow, may, type Job, type Page, type Timeline } from "./api";
import { Act, ago, Bar, CopyAs, Fault, Link, Segments, State, time, useLive, Why } from "./parts";

const STATES = ["", "queued", "processing", "completed", "failed", "canceled"];

export function Jobs() {
  const given = new URLSearchParams(location.search);
  const [state, kind, queue] = ["state", "kind", "queue"].map((n) => given.get(n) ?? "");
  const query = new URLSearchParams(Object.entries({ state, kind, queue }).filter(([, v]) => v));
  const [rows, setRows] = useState<Job[]>();
  const [fresh, setFresh] = useState<Job[]>([]);
  const [cursor, setCursor] = useState<string | null>();
  const [error, setError] = useState<Error>();
  const seen = useRef<Job[]>([]);
  const load = (more = "") => ask<Page<Job>>(`/v1/jobs?limit=50&${query}${more}`);
  const show = (list: Job[]) => { seen.current = list; setRows(list); };
  const begin = () => load().then((p) => { show(p.data); setFresh([]); setCursor(p.next_cursor); setError(undefined); }, setError);

  // Rows stay where they are: those shown change in place, those that are new wait to be asked for.
  const refresh = () => load().then((p) => {
    const now = new Map(p.data.map((j) => [j.id, j]));
    const known = new Set(seen.current.map((j) => j.id));
    show(seen.current.map((j) => now.get(j.id) ?? j));
    setFresh(p.data.filter((j) => !known.has(j.id) && j.id > (seen.current[0]?.id ?? "")));
  }, setError);
  useEffect(() => { begin(); return follow({}, refresh); }, [query.toString()]);

  const more = () => load(`&cursor=${cursor}`).then((p) => { show([...seen.current, ...p.data]); setCursor(p.next_cursor); }, setError);
  const to = (next: string) => { const q = new URLSearchParams(query); next ? q.set("state", next) : q.delete("state"); return `/ui/jobs?${q}`; };
  return (
    <main>
      <h1>Jobs</h1>
      <nav class="tabs" aria-label="States">
        {STATES.map((s) => <Link to={to(s)} aria-current={s === state ? "page" : undefined}>{s || "all"}</Link>)}
      </nav>
      <p class="tokens">
        {Object.entries({ kind, queue }).filter(([, v]) => v).map(([n, v]) =>
          <Link to={`/ui/jobs?${new URLSearchParams([...query].filter(([k]) => k !== n))}`}>{n}:{v} ✕</Link>)}
      </p>
      <Fault error={error} />
      {fresh.length > 0 && <button type="button" onClick={begin}>{fresh.length} new</button>}
      <JobTable rows={rows} />
      {cursor && <button type="button" onClick={more}>More</button>}
    </main>
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
              <td>{j.error?.code}</td>
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
  const [full, setFull] = useState<Job>();
  const [fault, setFault] = useState<Error>();
  useEffect(() => {
    if (!job) return;
    ask<Timeline>(`/v1/jobs/${id}/timeline`).then(setTimeline, setFault);
    if (job.state === "failed" && may("dlq:manage")) ask<Job>(`/v1/dead-letters/${id}`).then(setFull, () => undefined);
  }, [id, job?.state, job?.attempt, job?.stage]);
  const act = (what: string) => () => ask(`/v1/jobs/${id}/${what}`, "POST").then(again, setFault);
  if (!job) return <main><h1>Job</h1><Fault error={error} /></main>;
  const attempts = full?.attempts ?? job.attempts;
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
        {["queued", "processing"].includes(job.state) && <Act scope="jobs:write" on={act("cancel")}>Cancel</Act>}
        {job.state === "failed" && <Act scope="jobs:write" on={act("replay")}>Replay</Act>}
        <CopyAs path={`/v1/jobs/${id}`} python={`Client().jobs.get("${id}")`} command={`mediamill jobs get ${id}`} />
      </p>
      <Fault error={fault ?? error} />
      <Segments of={timeline} />
      <h2>Attempts</h2>
      {attempts.map((a) => (
        <details>
          <summary>{a.attempt} · {a.outcome ?? "running"} · {a.worker} {a.error && <b>{a.error.code}</b>}</summary>
          {a.commands?.map((c) => <pre>{c.command.join(" ")}{"\n"}exit {c.exit ?? 0} after {time(c.wall_seconds)}</pre>)}
          {a.log_tail && <pre>{a.log_tail}</pre>}
        </details>
      ))}
      {!attempts.length && <p>None yet.</p>}
      <details><summary>JSON</summary><pre>{JSON.stringify(job, null, 2)}</pre></details>
    </main>
  );
}
