import { useEffect, useState } from "preact/hooks";
import { ask, change, make, Problem, type Delivery, type Endpoint, type FullDelivery, type Letter, type NewEndpoint, type Page } from "./api";
import { Act, ago, Copy, Fault, go, Link, Needs, State, useLive } from "./parts";

const STATES = ["", "pending", "delivered", "exhausted", "canceled"];
const OVERLAPS = [["0", "none: the old secret ends now"], ["3600", "1 hour"], ["86400", "1 day"], ["604800", "7 days"]];

export const Webhooks = () => <main><h1>Webhooks</h1><Needs scope="webhooks:manage" for="Webhooks"><Endpoints /></Needs></main>;

function Endpoints() {
  const { value, error, again } = useLive(() => ask<Page<Endpoint>>("/v1/webhook-endpoints?limit=200"), []);
  const [made, setMade] = useState<NewEndpoint>();
  return (
    <>
      <Fault error={error} />
      {made && <Secret of={made} title={`${made.url} is registered`} />}
      {value && !value.data.length && <p>No address of yours is told of anything yet.</p>}
      {value && value.data.length > 0 && (
        <div class="wide" tabIndex={0} role="region" aria-label="Endpoints">
          <table>
            <thead><tr><th>Address</th><th>State</th><th>Types</th><th>Payload</th><th>Signed by</th><th>Health</th></tr></thead>
            <tbody>
              {value.data.map((e) => (
                <tr key={e.id}>
                  <td><Link to={`/ui/webhooks/${e.id}`}>{e.url}</Link> <small>{e.description}</small></td>
                  <td><State of={e.state} /></td>
                  <td>{e.types?.join(", ") ?? "all"}</td><td>{e.payload}</td><td>{e.signing}</td>
                  <td><Health of={e} /></td>
                </tr>
              ))}
            </tbody>
          </table>
        </div>
      )}
      {value && <Create done={(e) => { setMade(e); again(); }} />}
      <Inbox />
    </>
  );
}

function Health({ of }: { of: Endpoint }) {
  if (of.state === "disabled") return <>{of.reason ?? "switched off"}</>;
  if (!of.failing_since) return <>arrives</>;
  return <span class="fault">{of.failures} failed since {ago(of.failing_since)}{of.paused_until && ", paused for a while"}</span>;
}

function Create({ done }: { done: (made: NewEndpoint) => void }) {
  const [fault, setFault] = useState<Error>();
  const [url, setUrl] = useState("");
  const send = (event: SubmitEvent) => {
    event.preventDefault();
    const given = new FormData(event.currentTarget as HTMLFormElement);
    const types = String(given.get("types")).split(/[\s,]+/).filter(Boolean);
    make<NewEndpoint>("/v1/webhook-endpoints", {
      url, types: types.length ? types : null, description: String(given.get("description")) || null,
      payload: given.get("payload"), signing: given.get("signing"),
    }).then((made) => { setUrl(""); setFault(undefined); done(made); }, setFault);
  };
  return (
    <details open={false}>
      <summary>Register an endpoint</summary>
      <form onSubmit={send} class="form">
        <label>Address <input name="url" type="url" required value={url} onInput={(e) => setUrl(e.currentTarget.value)} /></label>
        <label>Description <input name="description" /></label>
        <label>Types <input name="types" placeholder="all, or media.*, job.failed" /></label>
        <label>Payload <select name="payload"><option>full</option><option>thin</option></select></label>
        <label>Signed by <select name="signing"><option>hmac</option><option>ed25519</option></select></label>
        <p class="actions">
          <button>Register</button>
          <button type="button" onClick={() => setUrl(`${location.origin}/v1/inbox`)}>Use the inbox</button>
        </p>
        <Fault error={fault} />
      </form>
    </details>
  );
}

// A secret is shown once: nobody can ask for it later.
function Secret({ of, title }: { of: NewEndpoint; title: string }) {
  return (
    <section class="once" role="status">
      <h2>{title}</h2>
      <p>Its {of.signing === "hmac" ? "secret" : "public key"} is shown here only: <code>{of.secret}</code> <Copy text={of.secret ?? ""} /></p>
      {of.old_secret_until && <p>The old one signs beside it until {new Date(of.old_secret_until).toLocaleString()}.</p>}
    </section>
  );
}

// Asked for only when somebody looks: an installation need not have one.
function Inbox() {
  const [open, setOpen] = useState(false);
  return (
    <details onToggle={(e) => e.target === e.currentTarget && setOpen(e.currentTarget.open)}>
      <summary>Inbox</summary>
      {open && <Letters />}
    </details>
  );
}

function Letters() {
  const { value, error } = useLive(() => ask<Page<Letter>>("/v1/inbox"), [], undefined, 3);
  const closed = error instanceof Problem && error.status === 404;
  return (
    <>
      {!closed && <Fault error={error} />}
      {closed && <p>A place to send your own webhooks to while you develop; the setting <code>inbox</code> opens it.</p>}
      {value && <p>What was sent to <code>{location.origin}/v1/inbox</code>, newest first. It forgets when the API starts again.</p>}
      {value && !value.data.length && <p>Nothing has arrived.</p>}
      {value?.data.slice(0, 50).map((letter) => (
        <details key={letter.headers["webhook-id"] + letter.received_at}>
          <summary>{typeOf(letter.body)} <small>{ago(letter.received_at)} · {letter.headers["webhook-id"]}</small></summary>
          <pre>{Object.entries(letter.headers).map(([n, v]) => `${n}: ${v}`).join("\n")}{"\n\n"}{pretty(letter.body)}</pre>
        </details>
      ))}
    </>
  );
}

const pretty = (text: string) => { try { return JSON.stringify(JSON.parse(text), null, 2); } catch { return text; } };
const typeOf = (text: string) => { try { return String(JSON.parse(text).type); } catch { return "not JSON"; } };

export function EndpointPage({ id }: { id: string }) {
  const path = `/v1/webhook-endpoints/${id}`;
  const { value: endpoint, error, again } = useLive(() => ask<Endpoint>(path), [id]);
  const [fault, setFault] = useState<Error>();
  const [said, setSaid] = useState("");
  const [rotated, setRotated] = useState<NewEndpoint>();
  const [overlap, setOverlap] = useState("86400");
  const [sent, setSent] = useState(0);
  if (!endpoint) return <main><h1>Webhook endpoint</h1><Fault error={error} /></main>;
  const enabled = endpoint.state === "enabled";
  const tried = (what: Promise<unknown>, words: string) =>
    what.then(() => { setFault(undefined); setSaid(words); setSent(Date.now()); again(); }, setFault);
  const test = () => tried(make(`${path}/test`), "A webhook.test event is on its way.");
  const turn = () => tried(change(path, "PATCH", { state: enabled ? "disabled" : "enabled" }), enabled ? "It is told nothing now." : "It is told again from now on.");
  const rotate = () => tried(make<NewEndpoint>(`${path}/rotate-secret`, { overlap_seconds: Number(overlap) }).then(setRotated), "");
  const recover = () => tried(
    ask(`${path}/recover`, "POST", { since: new Date(Date.now() - 86400e3).toISOString() }), "What did not arrive in the last day is sent again.");
  const remove = () => confirm("Forget this endpoint? What is pending for it is canceled.")
    && change(path, "DELETE").then(() => go("/ui/webhooks"), setFault);
  return (
    <main>
      <h1>{endpoint.url}</h1>
      <p>
        <State of={endpoint.state} /> · <Health of={endpoint} /> · {endpoint.types?.join(", ") ?? "all types"} · {endpoint.payload} ·
        signed by {endpoint.signing} <small>{endpoint.description}</small>
      </p>
      <p class="actions">
        {enabled && <Act scope="webhooks:manage" on={test}>Send a test event</Act>}
        <Act scope="webhooks:manage" on={turn}>{enabled ? "Disable" : "Enable"}</Act>
        {enabled && <Act scope="webhooks:manage" on={recover}>Recover the last day</Act>}
        <Act scope="webhooks:manage" on={remove}>Delete</Act>
      </p>
      <p class="actions">
        <label>The old secret goes on signing for <select value={overlap} onChange={(e) => setOverlap(e.currentTarget.value)}>
          {OVERLAPS.map(([seconds, words]) => <option value={seconds}>{words}</option>)}
        </select></label>
        <button type="button" onClick={rotate}>Rotate the secret</button>
      </p>
      {rotated && <Secret of={rotated} title="The secret is new" />}
      <p role="status">{said}</p>
      <Fault error={fault ?? error} />
      <Needs scope="deliveries:read" for="Deliveries"><Deliveries endpoint={id} sent={sent} /></Needs>
    </main>
  );
}

function Deliveries({ endpoint, sent }: { endpoint: string; sent: number }) {
  const state = new URLSearchParams(location.search).get("state") ?? "";
  const [most, setMost] = useState(25);
  const path = `/v1/webhook-endpoints/${endpoint}/deliveries?limit=${most}${state && `&state=${state}`}`;
  const { value, error, again } = useLive(() => ask<Page<Delivery>>(path), [path], undefined, 3);
  useEffect(() => { again(); }, [sent]);
  return (
    <>
      <h2>Deliveries</h2>
      <nav class="tabs" aria-label="States">
        {STATES.map((s) => <Link to={`/ui/webhooks/${endpoint}${s && `?state=${s}`}`} aria-current={s === state ? "page" : undefined}>{s || "all"}</Link>)}
      </nav>
      <Fault error={error} />
      {value && !value.data.length && <p>There are none.</p>}
      {value?.data.map((d) => <Attempts key={d.id} of={d} again={again} />)}
      {value?.next_cursor && most < 200 && <button type="button" onClick={() => setMost(200)}>More</button>}
    </>
  );
}

function Attempts({ of, again }: { of: Delivery; again: () => void }) {
  const [open, setOpen] = useState(false);
  const [full, setFull] = useState<FullDelivery>();
  const [fault, setFault] = useState<Error>();
  const [seen, setSeen] = useState("");
  const now = `${of.state} ${of.attempt}`;
  if (open && seen !== now) { // the attempts are read when somebody looks, and again when there are more
    setSeen(now);
    ask<FullDelivery>(`/v1/deliveries/${of.id}`).then(setFull, setFault);
  }
  const resend = () => ask(`/v1/deliveries/${of.id}/redeliver`, "POST").then(() => { setFault(undefined); again(); }, setFault);
  return (
    <details onToggle={(e) => setOpen(e.currentTarget.open)}>
      <summary>
        <State of={of.state} /> {of.type} <small>{ago(of.created_at)} · attempt {of.attempt}{of.status && ` · ${of.status}`}
          {of.reason && ` · ${of.reason}`}{of.next_attempt_at && ` · again at ${new Date(of.next_attempt_at).toLocaleTimeString()}`}</small>
      </summary>
      <p class="actions"><Act scope="webhooks:manage" on={resend}>Resend</Act> <code>{of.event_id}</code></p>
      <Fault error={fault} />
      {full?.attempts?.map((a) => (
        <p>Attempt {a.attempt}, {ago(a.at)}: {a.status ?? a.failure} after {a.duration_ms} ms {a.status && a.failure && <b>{a.failure}</b>}
          {a.response && <pre>{a.response}</pre>}</p>
      ))}
      {full && !full.attempts?.length && <p>Not tried yet.</p>}
      {full?.body && <pre>{pretty(full.body)}</pre>}
    </details>
  );
}
