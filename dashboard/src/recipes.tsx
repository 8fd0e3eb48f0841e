import { useEffect, useState } from "preact/hooks";
import { ask, type DryRun, type MediaItem, type Page, type Recipe, type Verdict } from "./api";
import { Fault, go, Link, size, time, useLive } from "./parts";

export function Recipes() {
  const { value, error } = useLive(() => ask<Page<Recipe>>("/v1/recipes"), [], undefined, 60);
  return (
    <main>
      <h1>Recipes</h1>
      <Fault error={error} />
      <div class="wide" tabIndex={0} role="region" aria-label="Recipes">
        <table>
          <thead><tr><th>Recipe</th><th>Newest</th><th>Versions</th><th>For</th><th>From</th></tr></thead>
          <tbody>
            {value?.data.map((r) => (
              <tr key={r.name}>
                <td><Link to={`/ui/recipes/${r.name}`}>{r.name}</Link></td><td>{r.version}</td><td>{r.versions.join(", ")}</td>
                <td>{r.kinds.join(", ")}</td><td>{r.built_in ? "built in" : "operator"}</td>
              </tr>
            ))}
          </tbody>
        </table>
      </div>
    </main>
  );
}

const text = (recipe: unknown) => JSON.stringify(recipe, null, 2);

export function RecipePage({ name }: { name: string }) {
  const given = new URLSearchParams(location.search);
  const wanted = given.get("version");
  const { value: recipe, error } = useLive(() => ask<Recipe>(`/v1/recipes/${name}${wanted ? `?version=${wanted}` : ""}`), [name, wanted], undefined, 60);
  if (!recipe) return <main><h1>Recipe</h1><Fault error={error} /></main>;
  const to = (version: string) => go(`/ui/recipes/${name}?version=${version}`);
  return (
    <main>
      <h1>{recipe.name} <small>version {recipe.version}</small></h1>
      <p>For {recipe.kinds.join(", ")} · {recipe.built_in ? "built in" : "from the operator's folder"}. A version never changes; a new one stands beside it.</p>
      <p class="actions">
        <label>Version <select value={String(recipe.version)} onChange={(e) => to(e.currentTarget.value)}>
          {recipe.versions.map((v) => <option>{v}</option>)}
        </select></label>
      </p>
      <Difference key={`${name}@${recipe.version}`} of={recipe} />
      <Try key={`try ${name}@${recipe.version}`} of={recipe} />
    </main>
  );
}

function Difference({ of }: { of: Recipe }) {
  const others = of.versions.filter((v) => v !== of.version);
  const [other, setOther] = useState("");
  const [lines, setLines] = useState<{ mark: string; value: string }[]>();
  const [fault, setFault] = useState<Error>();
  useEffect(() => {
    if (!other) return setLines(undefined);
    Promise.all([import("diff"), ask<Recipe>(`/v1/recipes/${of.name}?version=${other}`)]).then(([{ diffLines }, before]) => {
      setLines(diffLines(text(before.recipe), text(of.recipe)).map((part) => ({ mark: part.added ? "+" : part.removed ? "-" : " ", value: part.value })));
    }, setFault);
  }, [other]);
  return (
    <>
      {others.length > 0 && (
        <p><label>Compared with version <select value={other} onChange={(e) => setOther(e.currentTarget.value)}>
          <option value="">–</option>
          {others.map((v) => <option>{v}</option>)}
        </select></label></p>
      )}
      <Fault error={fault} />
      {lines
        ? <pre class="diff" aria-label="Differences">{lines.map((l) => {
            const shown = l.value.replace(/\n$/, "").split("\n").map((s) => `${l.mark} ${s}\n`).join("");
            return l.mark === "+" ? <ins>{shown}</ins> : l.mark === "-" ? <del>{shown}</del> : shown;
          })}</pre>
        : <details><summary>What it says</summary><pre>{text(of.recipe)}</pre></details>}
    </>
  );
}

// The recipe as it is, or as it is being written, against a media that is here. Nothing is kept.
function Try({ of }: { of: Recipe }) {
  const [draft, setDraft] = useState(text(of.recipe));
  const [sample, setSample] = useState("");
  const [said, setSaid] = useState<Verdict>();
  const [run, setRun] = useState<DryRun>();
  const [fault, setFault] = useState<Error>();
  const { value: media } = useLive(() => ask<Page<MediaItem>>("/v1/media?limit=50&state=ready,failed,processing"), [], undefined, 30);
  const samples = media?.data.filter((m) => m.kind && (m.width || m.kind === "audio")) ?? [];
  const chosen = sample || samples[0]?.id;
  const check = async () => {
    setRun(undefined);
    setFault(undefined);
    try {
      const recipe = JSON.parse(draft);
      const verdict = await ask<Verdict>("/v1/recipes/validate", "POST", recipe);
      setSaid(verdict);
      if (verdict.valid && chosen) setRun(await ask<DryRun>("/v1/recipes/dry-run", "POST", { media_id: chosen, recipe }));
    } catch (error) { setFault(error as Error); }
  };
  return (
    <section>
      <h2>Dry run</h2>
      <p>What it would make of a media that is here. Nothing is encoded or kept; change the text to try another recipe.</p>
      <p><label>Sample <select value={chosen} onChange={(e) => setSample(e.currentTarget.value)}>
        {samples.map((m) => <option value={m.id}>{m.filename ?? m.id} ({m.kind})</option>)}
      </select></label> {media && !samples.length && <Link to="/ui/uploads">Upload one first.</Link>}</p>
      <textarea aria-label="Recipe" rows={12} spellcheck={false} value={draft} onInput={(e) => setDraft(e.currentTarget.value)} />
      <p class="actions"><button type="button" onClick={check}>Check and run dry</button></p>
      <Fault error={fault} />
      <div role="status">
        {said && !said.valid && <ul>{said.errors.map((f) => <li class="fault"><code>{f.pointer || "/"}</code> {f.detail}</li>)}</ul>}
        {said?.valid && !run && !fault && <p>It is valid.</p>}
        {run && <p>It would make {run.outputs.length} outputs of this {run.kind}
          {run.estimate.p50_seconds != null && `, in about ${time(run.estimate.p50_seconds)}`} <small>({run.estimate.basis})</small>.</p>}
      </div>
      {run && (
        <div class="wide" tabIndex={0} role="region" aria-label="Outputs">
          <table>
            <thead><tr><th>Name</th><th>Type</th><th>Pixels</th><th>At most</th><th>Note</th></tr></thead>
            <tbody>
              {run.outputs.map((o) => (
                <tr key={o.name}>
                  <td>{o.name}</td><td>{o.type}</td><td>{o.width && o.height ? `${o.width} × ${o.height}` : ""}</td>
                  <td>{o.most_bytes == null ? "" : size(o.most_bytes)}</td><td>{o.note}</td>
                </tr>
              ))}
            </tbody>
          </table>
        </div>
      )}
    </section>
  );
}
