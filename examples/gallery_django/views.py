"""A form that takes pictures, a page for each, and the address that webhooks come to."""

from __future__ import annotations

from functools import cache

from django import forms
from django.conf import settings
from django.http import HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404, redirect, render
from django.views.decorators.csrf import csrf_exempt
from django.views.decorators.http import require_GET, require_http_methods, require_POST
from examples.gallery_django.models import Picture

from mediamill.client import Client, ConnectionFailed, Problem, SignatureMismatch, unwrap


class NewPicture(forms.Form):
    file = forms.FileField(label="A picture")


@cache
def client() -> Client:
    """One for the process; threads may share it."""
    return Client()


@require_http_methods(["GET", "POST"])
def index(request: HttpRequest) -> HttpResponse:
    """The form and what was sent. A POST hands the file on and leads to its page."""
    form = NewPicture(request.POST or None, request.FILES or None)
    if request.method == "POST" and form.is_valid():
        file = form.cleaned_data["file"]
        try:
            media = client().media.submit(
                file.temporary_file_path(),
                filename=file.name,
                callback_url=settings.GALLERY_CALLBACK_URL,
            )
        except Problem as error:
            form.add_error("file", f"{error.detail} {error.advice}")
        except ConnectionFailed:
            form.add_error("file", "Nothing answers there just now. Try again in a minute.")
        else:
            Picture.objects.update_or_create(media_id=media.id, defaults={"title": file.name})
            return redirect("picture", media_id=media.id)
    found = {"form": form, "pictures": Picture.objects.all()[:50]}
    return render(request, "gallery/index.html", found, status=400 if form.errors else 200)


@require_GET
def picture(request: HttpRequest, media_id: str) -> HttpResponse:
    """The status of a picture; at the end its variants, by addresses that are signed anew."""
    found = get_object_or_404(Picture, media_id=media_id)
    media = client().media.get(media_id) if found.state == "ready" else None
    return render(request, "gallery/picture.html", {"picture": found, "media": media})


@csrf_exempt
@require_POST
def told(request: HttpRequest) -> HttpResponse:
    """What Mediamill tells: believed only if its signature holds over the bytes as they came."""
    try:
        event = unwrap(request.body, request.headers, secret=settings.GALLERY_WEBHOOK_SECRET)
    except SignatureMismatch as error:
        return HttpResponse(str(error), status=401)
    if event.type.startswith("media.") and "state" in event.data:
        Picture.tell(event.data)
    return HttpResponse(status=204)
