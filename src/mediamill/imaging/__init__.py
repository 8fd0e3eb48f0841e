"""The program that decodes and makes pictures, run by the worker as a child process in a jail:

    python -I -m mediamill.imaging --fd N [--concurrency 1]

Descriptor N is one end of a Unix stream socket. A request is a JSON object with file descriptors
beside it, an answer is a JSON object; one request at a time, until the worker closes its end. The
program opens no path: it reads `fds[0]` and writes to the others. It keeps nothing of a request, so
one process serves many pictures.

Every request names an `op` and may carry `limits` (see facts.py). An answer holds either the
result, with `warnings` for people and `log` for the operator, or `failure` {code, detail, limit}.

    hello     what this process can do
    inspect   fds [in]: type, size as shown, frames, color, from the header alone
    preview   fds [in]: the same and `preview`: hashes, colors, an inline thumbnail
    make      fds [in, out, …]: the same and every one of `outputs` from one decode (see make.py)
    verify    fds [in]: decodes one of our outputs whole and holds it against the request
    draw      fds [in, out]: an SVG as a PNG; only in a process started with --drawings, which
              reads nothing but SVG and is ended after it
"""

from __future__ import annotations

import mmap

Data = bytes | mmap.mmap
"""The bytes of a picture. A map of the file, so that what no one reads is never loaded."""
