import { useState } from "preact/hooks";
import { ask, may, me, type Checks, type Key, type NewKey, type Page, type Setting } from "./api";
import { Act, ago, Copy, Fault, Needs, useLive } from "./parts";

const ROLES = [
  ["viewer", "sees media and jobs"],
  ["operator", "also uploads, processes, replays, and sees to webhooks"],
  ["admin", "everything in this tenant, keys too"],
];

export function Settings() {
  return (
    <main>
      <h1>Settings</h1>
      <p>You are signed in with the key <code>{me().id}</code> of the tenant <b>{me().tenant}</b>:
        {" "}{me().role ?? me().may.join(", ")}{may("operate") && ", and operator of the installation"}.</p>
      <Needs scope="admin" for="Keys"><Keys /></Needs>
      <Needs scope="operate" for="The storage and the configuration"><Storage /><Configuration /></Needs>
    </main>
  );
}

function Keys() {
  const { value, error, again } = useLive(() => ask<Page<Key>>("/v1/keys"), [], undefined, 30);
  const [made, setMade] = useState<NewKey>();
  const [fault, setFault] = useState<Error>();
  const [busy, setBusy] = useState(false);
  const create = (event: SubmitEvent) => {
    event.preventDefault();
    const form = event.currentTarget as HTMLFormElement;
    const given = new FormData(form);
    const days = Number(given.get("days"));
    setBusy(true);
    ask<NewKey>("/v1/keys", "POST", {
      name: given.get("name"), role: given.get("role"), scopes: given.get("operate") ? ["operate"] : [],
      ...(days > 0 && { ttl_seconds: days * 86400 }),
    }).then((key) => { setMade(key); setFault(undefined); form.reset(); again(); }, setFault).finally(() => setBusy(false));
  };
  const revoke = (k: Key) => confirm(`Refuse the key “${k.name}” (${k.id}) from now on?`)
    && ask(`/v1/keys/${k.id}`, "DELETE").then(again, setFault);
  return (
    <section>
      <h2>API keys</h2>
      <Fault error={fault ?? error} />
      {made && (
        <section class="once" role="status">
          <h3>The key “{made.name}” is made</h3>
          <p>It is shown here only: <code>{made.api_key}</code> <Copy text={made.api_key} /></p>
        </section>
      )}
      <div class="wide" tabIndex={0} role="region" aria-label="API keys">
        <table>
          <thead><tr><th>Name</th><th>Key</th><th>Role</th><th>Scopes</th><th>Made</th><th>Last used</th><th>Ends</th><th>Change</th></tr></thead>
          <tbody>
            {value?.data.map((k) => (
              <tr key={k.id}>
                <td>{k.name}</td><td><code>{k.id}…{k.last4}</code></td><td>{k.role ?? "–"}</td>
                <td class="broken">{k.scopes.join(", ")}</td><td>{ago(k.created_at)}</td><td>{k.last_used_at ? ago(k.last_used_at) : "never"}</td>
                <td>{k.revoked_at ? <span class="fault">revoked {ago(k.revoked_at)}</span> : k.expires_at ? new Date(k.expires_at).toLocaleString() : "never"}</td>
                <td>{k.id === me().id ? "yours" : !k.revoked_at && <Act scope="admin" on={() => revoke(k)}>Revoke {k.name}</Act>}</td>
              </tr>
            ))}
          </tbody>
        </table>
      </div>
      <details>
        <summary>Make a key</summary>
        <form class="form" onSubmit={create}>
          <label>Name <input name="name" required maxLength={100} placeholder="what it is for" /></label>
          <label>Role <select name="role">{ROLES.map(([role, words]) => <option value={role}>{role}: {words}</option>)}</select></label>
          {may("operate") && <label>Installation <span><input type="checkbox" name="operate" /> also queues, workers and settings</span></label>}
          <label>Days <input name="days" type="number" min={1} placeholder="∞" /></label>
          <p class="actions"><button disabled={busy}>Make it</button></p>
        </form>
      </details>
    </section>
  );
}

function Storage() {
  const [found, setFound] = useState<Checks>();
  const [fault, setFault] = useState<Error>();
  const [busy, setBusy] = useState(false);
  const check = () => {
    setBusy(true);
    ask<Checks>("/v1/storage-checks", "POST").then((c) => { setFound(c); setFault(undefined); }, setFault).finally(() => setBusy(false));
  };
  return (
    <section>
      <h2>Storage doctor</h2>
      <p class="actions"><Act scope="operate" on={check} disabled={busy}>Check the storage</Act></p>
      <Fault error={fault} />
      <p role="status">{found && (found.data.some((c) => c.ok === false) ? "Something must be mended." : "Nothing must be mended.")}</p>
      {found && (
        <ul class="checks">
          {found.data.map((c) => (
            <li class={c.ok === false ? "fault" : ""}>
              {c.ok === false ? "✗" : c.ok ? "✓" : "·"} <b>{c.name}</b> {c.detail} {c.ok !== true && c.remedy && <i>{c.remedy}</i>}
            </li>
          ))}
        </ul>
      )}
    </section>
  );
}

function Configuration() {
  const { value, error } = useLive(() => ask<Page<Setting>>("/v1/settings"), [], undefined, 60);
  const [changed, setChanged] = useState(true);
  const rows = value?.data.filter((s) => !changed || !s.is_default);
  return (
    <section>
      <h2>Configuration</h2>
      <p><label><input type="checkbox" checked={changed} onChange={(e) => setChanged(e.currentTarget.checked)} /> only what differs from the defaults</label></p>
      <Fault error={error} />
      {rows && (
        <div class="wide" tabIndex={0} role="region" aria-label="Configuration">
          <table>
            <thead><tr><th>Setting</th><th>Value</th><th>From</th></tr></thead>
            <tbody>
              {rows.map((s) => (
                <tr key={s.name}><td><code>{s.name}</code></td><td class="broken">{shown(s.value)}</td><td>{s.origin}</td></tr>
              ))}
            </tbody>
          </table>
        </div>
      )}
      {rows && !rows.length && <p>All settings have their defaults.</p>}
    </section>
  );
}

const shown = (value: unknown) => value === null ? "–" : typeof value === "string" ? value : JSON.stringify(value);
