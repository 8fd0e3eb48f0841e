// What several pages are made of.

import type { ComponentChildren } from "preact";
import { useCallback, useEffect, useState } from "preact/hooks";
import { follow, may, Problem, type Failure, type Timeline } from "./api";

export const go = (to: string) => { history.pushState(null, "", to); dispatchEvent(new PopStateEvent("popstate")); };

export function Link({ to, children, ...rest }: { to: string; children: ComponentChildren; class?: string; "aria-current"?: "page" }) {
  const click = (event: MouseEvent) => {
    if (event.metaKey || event.ctrlKey || event.shiftKey || event.button) return;
    event.preventDefault();
    go(to);
  };
  return <a href={to} onClick={click} {...rest}>{children}</a>;
}

// What `load` returns, kept fresh by the event stream and every few seconds besides.
export function useLive<T>(load: () => Promise<T>, keys: unknown[], what?: { media_id?: string; job_id?: string }, every = 10) {
  const [value, setValue] = useState<T>();
  const [error, setError] = useState<Error>();
  const again = useCallback(() => load().then((v) => { setValue(() => v); setError(undefined); }, setError), keys);
  useEffect(() => {
    setValue(undefined);
    again();
    const stop = what && follow(what, again);
    const timer = setInterval(again, every * 1000);
    return () => { stop?.(); clearInterval(timer); };
  }, keys);
  return { value, error, again };
}

// A button that is there only for a key that may do what it does.
export const Act = ({ scope, on, children, disabled }: { scope: string; on: () => unknown; children: ComponentChildren; disabled?: boolean }) =>
  may(scope) ? <button type="button" onClick={on} disabled={disabled}>{children}</button> : null;

// What a key may not see is not asked for, and the page says why it is missing.
export const Needs = ({ scope, for: what, children }: { scope: string; for: string; children?: ComponentChildren }) =>
  may(scope) ? <>{children}</> : <p class="lacks">{what}: your key may not see this; it lacks the scope <code>{scope}</code>.</p>;

export const Fault = ({ error }: { error?: Error }) => error
  ? <p role="alert" class="fault">{error.message} {error instanceof Problem && error.advice}</p> : null;

export const State = ({ of, dead }: { of: string; dead?: boolean }) =>
  <span class={`state ${dead ? "failed" : of}`}>{dead ? "dead letter" : of.replace("_", " ")}</span>;

export const Why = ({ error }: { error: Failure | null }) => error
  ? <p class="why"><b>{error.code}</b> {error.detail} <i>{error.advice}</i> {error.retryable ? "It may succeed later." : ""}</p> : null;

export const Bar = ({ percent, label }: { percent: number | null; label: string }) =>
  <progress max={100} value={percent ?? undefined} aria-label={label} />;

export const size = (bytes: number) => bytes < 1e6 ? `${(bytes / 1e3).toFixed(1)} kB` : `${(bytes / 1e6).toFixed(1)} MB`;
export const time = (seconds: number) => seconds < 60 ? `${seconds.toFixed(1)} s` : `${Math.floor(seconds / 60)} min ${Math.round(seconds % 60)} s`;
export const ago = (moment: string) => {
  const s = Math.max(0, (Date.now() - Date.parse(moment)) / 1000);
  return s < 60 ? `${Math.floor(s)} s ago` : s < 3600 ? `${Math.floor(s / 60)} min ago` : s < 86400 ? `${Math.floor(s / 3600)} h ago` : new Date(moment).toLocaleString();
};

export function Segments({ of }: { of?: Timeline }) {
  if (!of) return null;
  const total = of.total_seconds || 1;
  return (
    <section aria-label="Timeline">
      <h2>Timeline</h2>
      <p>{of.sentence}</p>
      <div class="segments" aria-hidden="true">
        {of.segments.map((s, n) => <span class={`c${n % 6}`} style={{ flexGrow: s.seconds / total }} title={`${s.name} ${time(s.seconds)}`} />)}
      </div>
      <ol class="legend">
        {of.segments.map((s, n) => <li><i class={`c${n % 6}`} /> {s.name.replace("_", " ")} <b>{time(s.seconds)}</b></li>)}
        <li>total <b>{time(of.total_seconds)}</b></li>
      </ol>
    </section>
  );
}

export function Copy({ text, name = "Copy" }: { text: string; name?: string }) {
  const [done, setDone] = useState(false);
  if (!navigator.clipboard) return null; // over plain HTTP from elsewhere a browser gives none
  return <button type="button" onClick={() => navigator.clipboard.writeText(text).then(() => setDone(true))}>{done ? "Copied" : name}</button>;
}

export interface Call { name: string; method: string; path: string; python: string; command: string; body?: unknown }

// The calls that a page makes, to take elsewhere.
export function Calls({ of }: { of: Call[] }) {
  return (
    <details>
      <summary>Copy as curl, Python or command</summary>
      {of.map((call) => {
        const body = call.body === undefined ? "" : ` -H "Content-Type: application/json" -d '${JSON.stringify(call.body)}'`;
        const curl = `curl -X ${call.method} -H "Authorization: Bearer $MEDIAMILL_API_KEY"${body} ${location.origin}${call.path}`;
        const python = `from mediamill import Client\n\nwith Client() as client:\n    ${call.python}\n`;
        return ([["curl", curl], ["Python", python], ["command", call.command]] as const).map(([form, text]) => (
          <figure key={`${call.name} ${form}`}><figcaption>{call.name} · {form} <Copy text={text} /></figcaption><pre>{text}</pre></figure>
        ));
      })}
    </details>
  );
}
