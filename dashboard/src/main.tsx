import { render } from "preact";
import { useEffect, useState } from "preact/hooks";
import { keep, signIn, signOut } from "./api";
import { JobPage, Jobs } from "./jobs";
import { Library, MediaPage } from "./media";
import { DeadLetters, Overview, Queues, Workers } from "./operate";
import { Fault, go, Link } from "./parts";
import { RecipePage, Recipes } from "./recipes";
import { Settings } from "./settings";
import { Uploads } from "./uploads";
import { EndpointPage, Webhooks } from "./webhooks";

const PAGES = [
  ["o", "/ui/", "Overview"], ["j", "/ui/jobs", "Jobs"], ["m", "/ui/media", "Media"], ["u", "/ui/uploads", "Uploads"],
  ["d", "/ui/dead-letters", "Dead letters"], ["q", "/ui/queues", "Queues"], ["w", "/ui/workers", "Workers"],
  ["h", "/ui/webhooks", "Webhooks"], ["r", "/ui/recipes", "Recipes"],
  ["s", "/ui/settings", "Settings"],
] as const;

function page(path: string) {
  const [, , name = "", id] = path.split("/");
  switch (name) {
    case "": return <Overview />;
    case "jobs": return id ? <JobPage id={id} /> : <Jobs />;
    case "media": return id ? <MediaPage id={id} /> : <Library />;
    case "uploads": return <Uploads />;
    case "dead-letters": return <DeadLetters />;
    case "queues": return <Queues />;
    case "workers": return <Workers />;
    case "webhooks": return id ? <EndpointPage id={id} /> : <Webhooks />;
    case "recipes": return id ? <RecipePage name={id} /> : <Recipes />;
    case "settings": return <Settings />;
    default: return <main><h1>Not found</h1><p><Link to="/ui/">To the overview</Link></p></main>;
  }
}

function SignIn({ done }: { done: () => void }) {
  const [error, setError] = useState<Error>();
  const send = (event: SubmitEvent) => {
    event.preventDefault();
    keep(String(new FormData(event.currentTarget as HTMLFormElement).get("key")).trim());
    signIn().then(done, (e) => { signOut(); setError(e); });
  };
  return (
    <main>
      <h1>Mediamill</h1>
      <form onSubmit={send}>
        <label>API key <input name="key" type="password" required autocomplete="off" /></label> <button>Sign in</button>
      </form>
      <Fault error={error} />
      <p>Make one with <code>mediamill keys create</code>. It is kept until this tab is closed.</p>
    </main>
  );
}

function App() {
  const [where, setWhere] = useState(location.pathname + location.search);
  const [signed, setSigned] = useState<boolean>();
  const [help, setHelp] = useState(false);
  useEffect(() => {
    const moved = () => setWhere(location.pathname + location.search);
    const out = () => { signOut(); setSigned(false); };
    addEventListener("popstate", moved);
    addEventListener("signed-out", out);
    signIn().then(setSigned, () => setSigned(false));
    let before = "";
    const pressed = (event: KeyboardEvent) => {
      if (event.ctrlKey || event.metaKey || event.altKey || (event.target as HTMLElement).closest("input, select, textarea")) return;
      const to = before === "g" && PAGES.find(([letter]) => letter === event.key);
      if (to) go(to[1]);
      if (event.key === "?") setHelp((h) => !h);
      const search = event.key === "/" && document.querySelector<HTMLInputElement>("input[type=search]");
      if (search) { event.preventDefault(); search.focus(); }
      before = event.key;
    };
    addEventListener("keydown", pressed);
    return () => { removeEventListener("popstate", moved); removeEventListener("signed-out", out); removeEventListener("keydown", pressed); };
  }, []);
  const path = where.split("?")[0];
  const here = [...PAGES].reverse().find(([, to]) => path.startsWith(to));
  useEffect(() => { document.title = `${here?.[2] ?? "Not found"} · Mediamill`; }, [path]);
  if (signed === undefined) return null;
  if (!signed) return <SignIn done={() => setSigned(true)} />;
  return (
    <>
      <header>
        <nav aria-label="Pages">
          {PAGES.map(([, to, name]) => <Link to={to} aria-current={here?.[1] === to ? "page" : undefined}>{name}</Link>)}
        </nav>
        <button type="button" onClick={() => { signOut(); setSigned(false); }}>Sign out</button>
      </header>
      {help && <aside aria-live="polite">Keys: {PAGES.map(([letter, , name]) => `g ${letter} ${name}`).join(" · ")} · / filter · ? this help</aside>}
      {page(path)}
    </>
  );
}

render(<App />, document.getElementById("app")!);
