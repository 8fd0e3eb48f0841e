"""Settings of the gallery: what it needs of Django, and where Mediamill is."""

from __future__ import annotations

import os
from pathlib import Path

SECRET_KEY = os.environ.get("GALLERY_SECRET_KEY", "for development only")
DEBUG = "GALLERY_SECRET_KEY" not in os.environ
ALLOWED_HOSTS = ["localhost", "127.0.0.1", *os.environ.get("GALLERY_HOSTS", "").split()]

INSTALLED_APPS = ["examples.gallery_django"]
MIDDLEWARE = [
    "django.middleware.common.CommonMiddleware",
    "django.middleware.csrf.CsrfViewMiddleware",
]
ROOT_URLCONF = "examples.gallery_django.urls"
TEMPLATES = [{"BACKEND": "django.template.backends.django.DjangoTemplates", "APP_DIRS": True}]
DATABASES = {
    "default": {
        "ENGINE": "django.db.backends.sqlite3",
        "NAME": os.environ.get("GALLERY_DATABASE", Path(__file__).with_name("gallery.sqlite3")),
    }
}
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
USE_TZ = True

# Uploads are written to a file and sent on from there, whatever their size.
FILE_UPLOAD_HANDLERS = ["django.core.files.uploadhandler.TemporaryFileUploadHandler"]

# MEDIAMILL_URL and MEDIAMILL_API_KEY are read by the client.
GALLERY_WEBHOOK_SECRET = os.environ.get("GALLERY_WEBHOOK_SECRET", "")
# The address of /hooks as Mediamill reaches it. Unset: it is told of all media, as by `listen`.
GALLERY_CALLBACK_URL = os.environ.get("GALLERY_CALLBACK_URL")
