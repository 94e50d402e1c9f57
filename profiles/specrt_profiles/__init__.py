"""The contract between export and run time: profiles, tensor names and shapes, the manifest."""
