"""OpenAI's API: what is asked, run and answered; the servicer is beside this folder."""
