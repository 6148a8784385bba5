"""The application for Ray's own tools, with settings in Python: `serve run deploy.ray.app:application`, from the clone.

With settings in YAML, for `serve deploy` and RayService, it is kvarn.server.ray.application:app, see serve.yaml.
"""

from kvarn.server.ray.application import app

application = app({"models": ["smollm2"], "max_replicas": 4, "target_waiting": 4.0})
