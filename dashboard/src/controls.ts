// The parts of the player's controls that are used, in a file of their own: loaded when something plays.
import "media-chrome/dist/media-controller.js";
import "media-chrome/dist/media-control-bar.js";
import "media-chrome/dist/media-play-button.js";
import "media-chrome/dist/media-time-range.js";
import "media-chrome/dist/media-time-display.js";
import "media-chrome/dist/media-mute-button.js";
import "media-chrome/dist/media-volume-range.js";
import "media-chrome/dist/media-playback-rate-button.js";
import "media-chrome/dist/media-captions-button.js";
import "media-chrome/dist/media-pip-button.js";
import "media-chrome/dist/media-fullscreen-button.js";
import "media-chrome/dist/media-preview-time-display.js";
