// The public API, as far as these pages use it. There is no other way in.

export interface Failure { code: string; title?: string; detail: string; advice: string; retryable: boolean }
export interface Estimate { p50_seconds: number | null; p90_seconds: number | null; basis: string }
export interface Preview { dominant_color?: string; inline?: { data: string; type?: string } }
export interface Variant {
  name: string; content_type: string; bytes: number; width: number | null; height: number | null;
  duration_seconds: number | null; seconds: number | null; url: string;
}
export interface MediaItem {
  id: string; state: string; kind: string | null; filename: string | null; content_type: string; size: number;
  width: number | null; height: number | null; duration_seconds: number | null; recipe: string;
  recipe_version: number; preview: Preview | null;
  error: Failure | null; created_at: string;
}
export interface Media extends MediaItem {
  stage: string | null; progress: number | null; variants: Variant[]; detected_type: string | null;
  job: { id: string; state: string; position: number | null; estimate: Estimate | null } | null;
}
export interface Attempt {
  attempt: number; worker: string | null; started_at: string | null; finished_at: string | null;
  outcome: string | null; error: Failure | null; log_tail?: string | null;
  commands?: { label: string; command: string[]; exit?: number | null; wall_seconds: number }[] | null;
}
export interface Job {
  id: string; state: string; kind: string; queue: string; stage: string | null; progress: number | null;
  position: number | null; estimate: Estimate | null; attempt: number; max_attempts: number; dead_letter: boolean;
  media_id: string | null; recipe: string | null; error: Failure | null; attempts: Attempt[]; created_at: string;
  finished_at: string | null; result: unknown; payload: unknown;
}
export interface Segment { name: string; seconds: number; attempt: number | null; worker: string | null }
export interface Timeline { total_seconds: number; sentence: string; segments: Segment[] }
export interface Queue {
  queue: string; queued: number; processing: number; oldest_seconds: number; slots: number; paused: boolean;
  draining: boolean; concurrency: number | null;
}
export interface Worker {
  id: string; host: string; version: string; slots: Record<string, number>; sandbox: string | null;
  started_at: string; seen_at: string; draining: boolean;
}
export interface Recipe {
  name: string; version: number; kinds: string[]; built_in: boolean; versions: number[]; recipe: Record<string, unknown>;
}
export interface Verdict { valid: boolean; errors: { pointer: string; detail: string }[] }
export interface DryRun {
  kind: string; estimate: Estimate;
  outputs: { name: string; type: string; width: number | null; height: number | null; most_bytes: number | null; note: string | null }[];
}
export interface Me { id: string; tenant: string; role: string | null; may: string[] }
export interface Key {
  id: string; name: string; last4: string; scopes: string[]; role: string | null; created_at: string;
  expires_at: string | null; revoked_at: string | null; last_used_at: string | null;
}
export interface NewKey extends Key { api_key: string }
export interface Setting { name: string; value: unknown; origin: string; is_default: boolean }
export interface Checks { storage: string; data: { name: string; ok: boolean | null; detail: string; remedy: string }[] }
export interface Figures {
  since: string; until: string; whole: boolean;
  steps: { at: string; completed: number; failed: number; p50_seconds: number | null; p95_seconds: number | null }[];
}
export interface DeadGroup { code: string | null; count: number; first_at: string; last_at: string; newest: string; detail: string; advice: string }
export interface Endpoint {
  id: string; url: string; description: string | null; types: string[] | null; payload: string; signing: string;
  state: string; reason: string | null; failures: number; failing_since: string | null; paused_until: string | null;
  created_at: string; secret?: string; old_secret_until?: string | null;
}
export interface DeliveryAttempt {
  attempt: number; at: string; duration_ms: number; status: number | null; response: string | null; failure: string | null;
}
export interface Delivery {
  id: string; event_id: string; type: string; state: string; reason: string | null; attempt: number; status: number | null;
  next_attempt_at: string | null; created_at: string; url?: string | null; body?: string | null; attempts?: DeliveryAttempt[];
}
export interface Letter { received_at: string; headers: Record<string, string>; body: string }
export interface Page<T> { data: T[]; next_cursor?: string | null }

const KEY = "mediamill-key";

export const key = () => sessionStorage.getItem(KEY);
export const signOut = () => { sessionStorage.removeItem(KEY); known = undefined; };
export const keep = (value: string) => sessionStorage.setItem(KEY, value);

export class Problem extends Error {
  constructor(readonly status: number, readonly code: string, detail: string, readonly advice: string) {
    super(detail);
  }
}

async function send(path: string, method: string, body: unknown, more: Record<string, string>): Promise<Response> {
  const headers: Record<string, string> = { Authorization: `Bearer ${key()}`, ...more };
  if (body !== undefined) headers["Content-Type"] = "application/json";
  const answer = await fetch(path, { method, headers, body: body === undefined ? undefined : JSON.stringify(body) });
  if (answer.ok) return answer;
  const said = await answer.json().catch(() => ({}));
  if (answer.status === 401) dispatchEvent(new Event("signed-out"));
  const faults: { pointer?: string; parameter?: string; detail: string }[] = said.errors ?? [];
  const detail = [said.detail ?? answer.statusText, ...faults.map((f) => `${f.pointer ?? f.parameter}: ${f.detail}`)].join(" ");
  throw new Problem(answer.status, said.code ?? String(answer.status), detail, said.advice ?? "");
}

export async function ask<T>(path: string, method = "GET", body?: unknown, more: Record<string, string> = {}): Promise<T> {
  const answer = await send(path, method, body, more);
  return answer.status === 204 ? (undefined as T) : answer.json();
}

// Bytes that only a key reads.
export const download = (path: string) => send(path, "GET", undefined, {}).then((answer) => answer.blob());

// Makes something: a click that is sent twice makes it once.
export const make = <T>(path: string, body: unknown = {}) => ask<T>(path, "POST", body, { "Idempotency-Key": `"${once()}"` });
const once = () => [...crypto.getRandomValues(new Uint32Array(4))].map((n) => n.toString(36)).join("");

// Changes what nobody else has changed since it was read here.
export async function change<T>(path: string, method: "PATCH" | "DELETE", body?: unknown): Promise<T> {
  const etag = (await send(path, "GET", undefined, {})).headers.get("ETag") ?? "";
  return ask<T>(path, method, body, { "If-Match": etag });
}

// A key that this machine gives to its own browser, where an operator allows that.
export async function signIn(): Promise<boolean> {
  if (!key()) {
    const answer = await fetch("/ui/session", { method: "POST" });
    if (!answer.ok) return false;
    keep((await answer.json()).api_key);
  }
  known = await ask<Me>("/v1/keys/self");
  return true;
}

// Whose key it is and what it may do; the pages show nothing else to press.
let known: Me | undefined;
export const me = () => known ?? { id: "", tenant: "", role: null, may: [] };
export const may = (scope: string) => me().may.includes(scope);

// Calls back after every change, at most twice a second, over cuts; returns what ends it.
export function follow(what: { media_id?: string; job_id?: string }, changed: (data: unknown) => void): () => void {
  let source: EventSource | undefined, over = false, timer = 0;
  const heard = (event: MessageEvent) => {
    const data = event.type === "job.progress" ? JSON.parse(event.data).data : undefined;
    if (data) return changed(data);
    clearTimeout(timer);
    timer = setTimeout(() => changed(undefined), 500);
  };
  const open = async () => {
    if (over) return;
    try {
      const { url } = await ask<{ url: string }>("/v1/stream-urls", "POST", what);
      if (over) return;
      const address = new URL(url);
      source = new EventSource(address.pathname + address.search);
      for (const type of TYPES) source.addEventListener(type, heard);
      source.onerror = () => { source?.close(); timer = setTimeout(open, 3000); };
    } catch { timer = setTimeout(open, 5000); }
  };
  open();
  return () => { over = true; clearTimeout(timer); source?.close(); };
}

const TYPES = [
  "snapshot", "reset", "job.progress", "variant.ready",
  ...["uploaded", "queued", "processing", "preview", "ready", "failed", "expired", "deleted"].map((s) => `media.${s}`),
  ...["queued", "processing", "completed", "failed", "canceled", "dead_lettered"].map((s) => `job.${s}`),
];
